"""Byte images in shared memory, as the cases build and expect them: operand layouts of wgmma, boxes of tensor maps.

Written from the PTX ISA (sections 9.7.15.5 and 5.5.3) for the comparison with a GPU; the emulator's layout
functions have no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from .case import Map
from .driver import ELEMENTS

SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
_MASK = {"none": 0, "32B": 0x10, "64B": 0x30, "128B": 0x70}
_DESCRIPTOR_CODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def swizzled(address: np.ndarray, mode: str) -> np.ndarray:
    """16-byte chunks exchanged by the address bits above them."""
    return address ^ ((address >> 3) & _MASK[mode])


@dataclass(frozen=True)
class Operand:
    """A wgmma operand [rows, K] of `size`-byte elements as an image of bytes.

    leading and stride are the descriptor's offsets in bytes; steps the byte offset of each K step of 32 bytes.
    """

    image: np.ndarray
    descriptor: int
    steps: tuple[int, ...]


def operand(
    values: np.ndarray,
    swizzle: str,
    mn_major: bool = False,
    k_first: bool = False,
    base_offset: int = 0,
    origin: int = 0,
) -> Operand:
    """Lay out `values` [rows, K] (an unsigned type).

    k_first (K-major without swizzle only): pieces that follow in K are adjacent, instead of pieces that follow in rows.
    base_offset: the field of the descriptor. origin: the address the swizzle is computed from (the image's own start,
    when it is swizzled by absolute addresses).
    """
    rows, k = values.shape
    size = values.dtype.itemsize
    r, c = np.meshgrid(np.arange(rows), np.arange(k), indexing="ij")
    span = SPAN[swizzle]
    per_step = 32 // size
    first = np.arange(0, k, per_step)
    if mn_major and swizzle == "none":
        stride, leading = 128, rows // 8 * 128
        address = r // 8 * stride + r % 8 * size + c // 8 * leading + c % 8 * 16
        steps = first // 8 * leading
    elif mn_major:
        wide = span // size
        stride, leading = 8 * span, k // 8 * 8 * span
        address = r // wide * leading + r % wide * size + c // 8 * stride + c % 8 * span
        steps = first // 8 * stride
    elif swizzle == "none":
        leading, stride = (128, k * size // 16 * 128) if k_first else (rows // 8 * 128, 128)
        address = r // 8 * stride + r % 8 * 16 + c * size // 16 * leading + c * size % 16
        steps = first * size // 16 * leading
    else:
        leading, stride = 16, 8 * span
        block = rows * span  # of one span of K
        address = c * size // span * block + r // 8 * stride + r % 8 * span + c * size % span
        steps = first * size // span * block + first * size % span
    address = swizzled(address + origin, swizzle) - origin
    image = np.zeros(-(-int(address.max() + size) // 16) * 16, np.uint8)
    for byte in range(size):
        image[address + byte] = values.view(np.uint8).reshape(rows, k, size)[:, :, byte]
    descriptor = leading >> 4 << 16 | stride >> 4 << 32 | base_offset << 49 | _DESCRIPTOR_CODE[swizzle] << 62
    return Operand(image, descriptor, tuple(int(s) for s in steps))


def box_counts(m: Map) -> tuple[int, ...]:
    """Elements of a box in each dimension, innermost first; the innermost stride is ignored."""
    return tuple(-(-b // s) for b, s in zip(m.box, (1, *m.traversal[1:]), strict=True))


def box_bytes(m: Map) -> int:
    """Bytes that a load of the box completes on its barrier, whatever part of it lies outside the tensor."""
    return int(np.prod(box_counts(m))) * ELEMENTS[m.element][1]


def image_bytes(m: Map) -> int:
    """Bytes from the first to the last of a box in shared memory: a row is as long as the swizzle is wide."""
    return box_bytes(m) // _row_bytes(m) * _row_pitch(m)


def _row_bytes(m: Map) -> int:
    return m.box[0] * ELEMENTS[m.element][1]


def _row_pitch(m: Map) -> int:
    return _row_bytes(m) if m.swizzle == "none" else SPAN[m.swizzle]


def box_places(
    m: Map, coordinates: tuple[int, ...], origin: int = 0, whole_pieces: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """For each byte of the box: the byte of the tensor (-1 outside it), and its address in the image.

    whole_pieces: a row of the tensor reaches to the end of its last 16 bytes, as stores and reductions take it.
    """
    size = ELEMENTS[m.element][1]
    counts = box_counts(m)
    dims = list(m.dims)
    if whole_pieces:
        dims[0] = -(-dims[0] * size // 16) * 16 // size
    pitch = (size, *m.strides)
    source = np.full((int(np.prod(counts)), size), -1, np.int64)
    for n, index in enumerate(product(*(range(c) for c in reversed(counts)))):
        steps = (1, *m.traversal[1:])
        at = [c + i * s for c, i, s in zip(coordinates, reversed(index), steps, strict=False)]
        if all(0 <= a < d for a, d in zip(at, dims, strict=True)):
            source[n] = sum(a * p for a, p in zip(at, pitch, strict=True)) + np.arange(size)
    byte = np.arange(source.size)
    address = byte // _row_bytes(m) * _row_pitch(m) + byte % _row_bytes(m)
    return source.reshape(-1), swizzled(address + origin, m.swizzle) - origin


def load_box(
    tensor: np.ndarray,
    m: Map,
    coordinates: tuple[int, ...],
    fill: bytes = b"",
    origin: int = 0,
    background: int = 0,
) -> np.ndarray:
    """The image a load leaves in shared memory.

    fill: the bytes of an element outside the tensor (zeros). origin: the address of the image, whose low bits take part
    in the swizzle. background: what shared memory held before, seen between rows that are narrower than the swizzle.
    """
    source, address = box_places(m, coordinates, origin)
    data = tensor.reshape(-1).view(np.uint8)
    outside = np.frombuffer(fill or bytes(1), np.uint8)
    values = np.where(source < 0, outside[np.arange(len(source)) % len(outside)], data[np.maximum(source, 0)])
    image = np.full(image_bytes(m), background, np.uint8)
    image[address] = values
    return image


def store_box(tensor: np.ndarray, m: Map, coordinates: tuple[int, ...], image: np.ndarray) -> np.ndarray:
    """The tensor after an image was stored; what lies outside is dropped, but for the last 16 bytes of its rows."""
    source, address = box_places(m, coordinates, whole_pieces=True)
    out = tensor.copy()
    inside = source >= 0
    out.reshape(-1).view(np.uint8)[source[inside]] = image[address[inside]]
    return out
