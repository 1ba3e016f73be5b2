"""Tiled tensor maps: what cuTensorMapEncodeTiled makes on a GPU, with an encoding of our own in the 128 bytes.

The real 128 bytes are opaque, so these hold the fields plainly (see `_LAYOUT`); a kernel may copy them, or fill 128
zero bytes with tensormap.replace, and both decode. Dimensions are innermost first everywhere, as in the driver's
interface. Limits are those of the driver's documentation of cuTensorMapEncodeTiled; codes are those of PTX ISA 9.7.9.26
(they differ from the driver's enumerations).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .errors import LaunchError
from .memory import CONST_WINDOW, GLOBAL_BASE, PARAM_WINDOW, WINDOW_BYTES, Buffer, Memory

if TYPE_CHECKING:
    from .launch import Launch

BYTES = 128
MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
# Names in the order of tensormap.replace's elemtype codes (PTX ISA table 33).
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz")
SIZES = dict(zip(ELEMENTS, (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4), strict=True))
FLOATS = ("f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz")
# Name -> (swizzle_mode, swizzle_atomicity) codes, bytes of the span that a row must fit in.
SWIZZLES = {"none": (0, 0), "32B": (1, 0), "64B": (2, 0), "128B": (3, 0), "128B_ATOM32B": (3, 1)}
SPANS = {"none": 0, "32B": 32, "64B": 64, "128B": 128, "128B_ATOM32B": 128}
FILLS = ("zero", "nan")
# What out-of-bounds elements of a float are with fill "nan", by size. As an H200 fills f16, bf16 and f32.
NAN_BITS = {2: 0x7FF7, 4: 0x7FF77FF7, 8: 0x7FF77FF77FF77FF7}

_MAGIC = int.from_bytes(b"TensrMap", "little")
# magic, address, dims[5], box[5], element strides[5] as bytes, rank - 1, elemtype, interleave, strides[4], swizzle,
# atomicity, fill, l2, number of the map + 1 (0 = made by the kernel).
_LAYOUT = struct.Struct("<QQ5I5I5BBBB4Q4BI")
_FIELDS = {
    "global_dim": 2,
    "box_dim": 7,
    "element_stride": 12,
    "rank": 17,
    "elemtype": 18,
    "interleave_layout": 19,
    "global_stride": 20,
    "swizzle_mode": 24,
    "swizzle_atomicity": 25,
    "fill_mode": 26,
    "global_address": 1,
}
_COUNTS = {"global_dim": 5, "box_dim": 5, "element_stride": 5, "global_stride": 4}
_WIDTHS = {"global_dim": 32, "box_dim": 32, "global_stride": 64, "global_address": 64}  # others: a byte


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one instruction moves. Sizes in elements, strides in bytes."""

    id: int  # number of the map on its device; -1 for one that a kernel made
    address: int
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # of dims 1 and up
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    interleave: str = "none"
    fill: str = "zero"
    buffer: Buffer | None = None  # None after decoding

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.element]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements that the box has in shared memory along each dimension, innermost first.

        The step of dimension 0 is ignored without interleaving; along others ceil(box / step) elements are moved.
        """
        steps = (1, *self.element_strides[1:])
        return tuple(-(-b // s) for b, s in zip(self.box, steps, strict=True))

    @cached_property
    def row_bytes(self) -> int:
        return self.box[0] * self.size

    @cached_property
    def pitch(self) -> int:
        """Bytes from row to row in shared memory: a row narrower than its swizzle leaves the rest of the span free."""
        return max(self.row_bytes, SPANS[self.swizzle])

    @cached_property
    def box_bytes(self) -> int:
        """What a load signals, clipped or not: the elements of the box, without the gaps of narrow rows."""
        return int(np.prod(self.counts, dtype=np.int64)) * self.size

    @cached_property
    def bytes(self) -> bytes:
        pad = MAX_RANK - self.rank
        return _LAYOUT.pack(
            _MAGIC,
            self.address,
            *(d & 0xFFFFFFFF for d in self.dims),
            *(0,) * pad,
            *self.box,
            *(0,) * pad,
            *self.element_strides,
            *(0,) * pad,
            self.rank - 1,
            ELEMENTS.index(self.element),
            0,
            *self.strides,
            *(0,) * pad,
            *SWIZZLES[self.swizzle],
            FILLS.index(self.fill),
            0,
            self.id + 1,
        ).ljust(BYTES, b"\0")

    def __repr__(self) -> str:
        return (
            f"TensorMap({self.element} {list(self.dims)} at {self.address:#x}, strides {list(self.strides)}, "
            f"box {list(self.box)}, swizzle {self.swizzle}, fill {self.fill})"
        )


def encode(
    number: int,
    buffer: Buffer,
    *,
    element: str,
    dims: Sequence[int],
    box: Sequence[int],
    strides: Sequence[int] | None = None,
    swizzle: str = "none",
    fill: str = "zero",
    element_strides: Sequence[int] | None = None,
    interleave: str = "none",
    l2: str = "none",
    address_offset: int = 0,
) -> TensorMap:
    """A map of `buffer` (from `address_offset` bytes on).

    `dims`, `box`, `element_strides`: elements, innermost first. `strides`: bytes of dims 1 and up, default contiguous.
    `l2` (promotion) is a hint and has no effect. Raises `LaunchError` where the driver would refuse.
    """
    if element not in SIZES:
        raise LaunchError(f"element={element!r}: allowed are {', '.join(ELEMENTS)}")
    if interleave != "none":
        raise LaunchError(f"interleave={interleave!r}: only 'none' is supported")
    if swizzle not in SWIZZLES:
        raise LaunchError(f"swizzle={swizzle!r}: allowed are {', '.join(SWIZZLES)}")
    if fill not in FILLS:
        raise LaunchError(f"fill={fill!r}: allowed are {', '.join(FILLS)}")
    if not 1 <= len(dims) <= MAX_RANK:
        raise LaunchError(f"dims={tuple(dims)}: 1 to {MAX_RANK} dimensions are allowed")
    dims = tuple(int(d) for d in dims)
    if strides is None:
        rows = np.cumprod([SIZES[element], *dims[:-1]], dtype=np.int64)
        strides = tuple(int(s) for s in rows[1:])
    steps = (1,) * len(dims) if element_strides is None else tuple(int(s) for s in element_strides)
    found = TensorMap(
        number,
        buffer.address + address_offset,
        element,
        dims,
        tuple(int(s) for s in strides),
        tuple(int(b) for b in box),
        steps,
        swizzle,
        interleave,
        fill,
        buffer,
    )
    reason = problem(found)
    if reason:
        raise LaunchError(reason)
    return found


def problem(m: TensorMap) -> str:
    """Why the driver would refuse this map; "" if it would not."""
    rank = m.rank
    for name, values, count in (
        ("box", m.box, rank),
        ("strides", m.strides, rank - 1),
        ("element_strides", m.element_strides, rank),
    ):
        if len(values) != count:
            return f"{name}={values}: {count} values are needed for {rank} dimensions"
    if m.address % 16:
        return f"address {m.address:#x}: a multiple of 16 is needed"
    if any(not 1 <= d <= 1 << 32 for d in m.dims):
        return f"dims={m.dims}: 1 to 2**32 elements are allowed"
    if any(s % 16 or not 0 <= s < 1 << 40 for s in m.strides):
        return f"strides={m.strides}: multiples of 16 bytes below 2**40 are allowed"
    if any(not 1 <= b <= MAX_BOX for b in m.box):
        return f"box={m.box}: 1 to {MAX_BOX} elements are allowed"
    if any(not 1 <= s <= MAX_ELEMENT_STRIDE for s in m.element_strides):
        return f"element_strides={m.element_strides}: 1 to {MAX_ELEMENT_STRIDE} are allowed"
    if m.row_bytes % 16:
        return f"box={m.box}: the innermost has {m.row_bytes} bytes, a multiple of 16 is needed"
    if m.swizzle != "none" and m.row_bytes > SPANS[m.swizzle]:
        return f"box={m.box}: the innermost has {m.row_bytes} bytes, swizzle {m.swizzle} allows {SPANS[m.swizzle]}"
    if m.fill == "nan" and m.element not in FLOATS:
        return f"fill='nan' with element {m.element}: only floating-point elements can be filled so"
    return ""


@lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    """The map in 128 bytes. Raises `ValueError` with a sentence where they hold none, or one that is not legal."""
    values = _LAYOUT.unpack_from(raw)
    if values[0] != _MAGIC:
        raise ValueError(f"the 128 bytes hold no tensor map (they start with {raw[:8].hex()})")
    rank = values[17] + 1
    element, interleave = values[18], values[19]
    swizzle = next((name for name, codes in SWIZZLES.items() if codes == values[24:26]), "")
    if rank > MAX_RANK:
        raise ValueError(f"the tensor map has {rank} dimensions, at most {MAX_RANK} are allowed")
    if element >= len(ELEMENTS) or interleave or not swizzle or values[26] >= len(FILLS):
        raise ValueError(
            f"the tensor map has elemtype {element}, interleave {interleave}, swizzle mode {values[24]} with atomicity "
            f"{values[25]}, fill {values[26]}; supported are elemtype 0..{len(ELEMENTS) - 1}, interleave 0, swizzle "
            f"modes 0..3 with atomicity 0 (3 also with 1), fill 0 and 1"
        )
    made = TensorMap(
        values[28] - 1,
        values[1],
        ELEMENTS[element],
        # A dimension of 2**32 does not fit in its field and is stored as 0; a kernel's own map has no such dimension.
        tuple(d or (1 << 32 if values[28] else 0) for d in values[2 : 2 + rank]),
        values[20 : 20 + rank - 1],
        values[7 : 7 + rank],
        values[12 : 12 + rank],
        swizzle,
        "none",
        FILLS[values[26]],
    )
    reason = problem(made)
    if reason:
        raise ValueError(f"the tensor map is not legal: {reason}")
    return made


def replaced(raw: bytes, field: str, ordinal: int, value: int) -> bytes:
    """tensormap.replace: the 128 bytes with one field changed (PTX ISA 9.7.9.26). Raises `ValueError`."""
    if field not in _FIELDS:
        raise ValueError(f"tensormap.replace of field .{field}: {', '.join(sorted(_FIELDS))} are supported")
    count = _COUNTS.get(field, 1)
    if not 0 <= ordinal < count:
        raise ValueError(f"tensormap.replace.{field} of ordinal {ordinal}: 0..{count - 1} are allowed")
    value &= (1 << (64 if _WIDTHS.get(field) == 64 else 32)) - 1
    if value >> _WIDTHS.get(field, 8):
        raise ValueError(f"tensormap.replace.{field}: {value} is out of range")
    values = list(_LAYOUT.unpack_from(raw))
    values[0] = _MAGIC
    values[_FIELDS[field] + ordinal] = value
    values[28] = 0
    return _LAYOUT.pack(*values).ljust(BYTES, b"\0")


def lookup(launch: Launch, address: int) -> TensorMap:
    """The map at a generic address in parameters, constant or global memory. Raises `ValueError` with a sentence."""
    memory: Memory
    if address >= GLOBAL_BASE:
        memory, offset = launch.device.memory, address - GLOBAL_BASE
        valid = launch.device.memory.valid[offset : offset + BYTES]
        inside = len(valid) == BYTES and bool(valid.all())
    elif PARAM_WINDOW <= address < PARAM_WINDOW + WINDOW_BYTES:
        memory, offset = launch.params, address - PARAM_WINDOW
        inside = offset + BYTES <= memory.size
    elif CONST_WINDOW <= address < CONST_WINDOW + WINDOW_BYTES:
        memory, offset = launch.constant, address - CONST_WINDOW
        inside = offset + BYTES <= memory.size
    else:
        raise ValueError(
            f"tensor map address {address:#x}: a generic address of .param, .const or .global memory is needed"
        )
    if not inside:
        raise ValueError(f"tensor map address {address:#x} is outside every allocation")
    if address % 64:
        raise ValueError(f"tensor map address {address:#x}: a multiple of 64 is needed")
    return decode(memory.u8[offset : offset + BYTES].tobytes())


__all__ = ["ELEMENTS", "TensorMap", "decode", "encode", "lookup", "problem", "replaced"]
