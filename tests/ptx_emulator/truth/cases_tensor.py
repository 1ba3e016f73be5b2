"""Loads and stores of boxes through tensor maps: dimensions, swizzles, edges, strides, and what the GPU refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import Arrays, Case, Map, MapPointer, Struct, i32, integers, raw, u32, untouched
from .driver import ELEMENTS
from .images import box_bytes, image_bytes, load_box, store_box

GUARD = 64  # bytes shown behind a box


def _tensor(seed: str, m: Map) -> np.ndarray:
    """The bytes under a map, random but for floating point, where they are small integers."""
    size = ELEMENTS[m.element][1]
    extent = m.strides[-1] * m.dims[-1] if m.strides else m.dims[0] * size + GUARD
    if m.element in ("f32", "tf32"):
        return integers(seed, (extent // 4,), -99, 99).astype(np.float32).view(np.uint8)
    return raw(seed, (extent,), np.uint8)


def _load(
    name: str,
    m: Map,
    coordinates: tuple[int, ...],
    fill: bytes = b"",
    offset: int = 0,
    **more: Any,
) -> Case:
    """One box, `offset` bytes into shared memory."""
    rank = len(m.dims)
    size = image_bytes(m)
    dump = offset + size + GUARD
    tensor = _tensor(f"load/{name}", m)

    def expect(given: Arrays) -> Arrays:
        out = np.full(dump, 0xA5, np.uint8)
        out[offset : offset + size] = load_box(given["tensor"], m, coordinates, fill, offset, 0xA5)
        return {"out": out}

    tile = Struct((*(i32(c) for c in (*coordinates, *(0,) * (5 - rank))), u32(box_bytes(m)), u32(dump), u32(offset)))
    return Case(
        name=f"tma_load/{rank}d-{name}",
        module="tma_load",
        kernel=f"load_{rank}d",
        buffers={"tensor": tensor, "out": untouched((dump,), np.uint8)},
        outputs=("out",),
        args=(m, tile, "out"),
        shared=dump,
        expect=None if more.get("faults") else expect,
        **more,
    )


def _matrix(
    element: str, box: tuple[int, int], swizzle: str = "none", dims: tuple[int, int] = (100, 20), **more
) -> Map:
    """A padded row-major matrix."""
    pitch = (dims[0] * ELEMENTS[element][1] + 31) // 32 * 32
    return Map("tensor", element, dims, (pitch,), box, swizzle, **more)


def _load_cases() -> Iterator[Case]:
    # The innermost coordinate must be a multiple of 16 bytes, negative or beyond the tensor as it may be.
    line = Map("tensor", "u8", (1000,), (), (64,))
    for name, at in (("inside", 128), ("clipped", 960), ("negative", -16), ("outside", 1008), ("far-outside", -5008)):
        yield _load(name, line, (at,))
    yield _load("misaligned", line, (8,), faults=True)
    yield _load("u64", Map("tensor", "u64", (41,), (), (12,)), (34,))
    for swizzle, width in (("none", 64), ("32B", 16), ("64B", 32), ("128B", 64)):
        m = _matrix("bf16", (width, 16), swizzle)
        yield _load(f"{swizzle}-inside", m, (8, 2))
        yield _load(f"{swizzle}-clipped", m, (104 - width // 2, 9))
    yield _load("128B-negative", _matrix("f16", (64, 8), "128B"), (-8, -3))
    yield _load("wide-rows", _matrix("u16", (96, 4)), (16, 17))
    yield _load("f32-32B", _matrix("f32", (8, 10), "32B"), (96, 15))
    yield _load("s32-64B", _matrix("s32", (16, 5), "64B"), (-4, 2))
    yield _load("f64-128B", _matrix("f64", (16, 3), "128B", (30, 5)), (18, 1))
    yield _load("s64-none", _matrix("s64", (2, 7), dims=(9, 11)), (8, 5))
    yield _load("u8-128B", _matrix("u8", (128, 6), "128B", (200, 9)), (96, 4))
    yield _load("tf32-128B", _matrix("tf32", (32, 6), "128B"), (4, 1))
    yield _load("misaligned-4", _matrix("f32", (8, 4)), (1, 1), faults=True)
    yield _load("misaligned-8", _matrix("f32", (8, 4)), (2, 1), faults=True)
    yield _load("offset-128", _matrix("f16", (64, 8), "128B"), (0, 0), offset=128 * 5)
    yield _load("offset-64", _matrix("u32", (8, 4)), (0, 0), offset=64, faults=True)
    # A box narrower than its swizzle has rows as long as the swizzle; its barrier sees the bytes of the elements.
    yield _load("narrow-128B", _matrix("bf16", (16, 16), "128B"), (8, 1))
    yield _load("narrow-64B", _matrix("f32", (8, 8), "64B"), (96, 15))

    nan = {"f16": b"\xf7\x7f", "bf16": b"\xf7\x7f", "f32": b"\xf7\x7f\xf7\x7f"}
    for element, pattern in nan.items():
        yield _load(f"{element}-nan", _matrix(element, (16, 6), "none", (42, 9), fill="nan"), (32, 5), pattern)

    yield _load("rows-2", _matrix("u16", (32, 8), element_strides=(1, 2)), (72, 3))
    yield _load("rows-3", _matrix("u16", (32, 8), "64B", element_strides=(1, 3)), (0, -2))
    yield _load("columns-2", _matrix("u16", (64, 4), element_strides=(2, 1)), (8, 3))

    cube = Map("tensor", "u16", (40, 7, 5), (96, 96 * 8), (16, 4, 3), "32B")
    yield _load("inside", cube, (8, 1, 2))
    yield _load("corner", cube, (32, 5, 3))
    yield _load("below", cube, (-8, -1, -2))
    spaced = Map("tensor", "bf16", (40, 9, 8), (96, 96 * 9), (8, 5, 6), element_strides=(1, 2, 3))
    yield _load("strides", spaced, (8, 1, 0))
    four = Map("tensor", "u32", (12, 5, 4, 3), (48, 240, 960), (4, 3, 2, 2))
    yield _load("inside", four, (4, 1, 1, 0))
    yield _load("corner", four, (8, 3, 3, 2))
    five = Map("tensor", "u8", (48, 3, 4, 3, 2), (48, 144, 576, 1728), (32, 2, 3, 2, 2), "32B")
    yield _load("inside", five, (16, 0, 1, 1, 0))
    yield _load("corner", five, (32, 2, 2, 2, 1))
    yield _load("below", five, (-16, -1, -1, 0, -1))

    m = _matrix("bf16", (32, 8), "64B")
    tensor = _tensor("load/global", m)
    yield Case(
        name="tma_load/2d-map-in-global",
        module="tma_load",
        kernel="load_2d_map_in_global",
        buffers={"tensor": tensor, "out": untouched((512,), np.uint8)},
        outputs=("out",),
        args=(MapPointer(m), i32(80), i32(15), u32(512), "out"),
        shared=512,
        expect=lambda given: {"out": load_box(given["tensor"], m, (80, 15))},
    )
    ring = _matrix("bf16", (64, 4), "128B", (64, 20))
    yield Case(
        name="tma_load/2d-ring",
        module="tma_load",
        kernel="load_2d_ring",
        buffers={"tensor": _tensor("load/ring", ring), "out": untouched((5, 512), np.uint8)},
        outputs=("out",),
        args=(ring, i32(4), i32(5), u32(512), "out"),
        block=(64, 1, 1),
        shared=1024,
        expect=lambda given: {
            "out": np.stack([load_box(given["tensor"], ring, (0, 4 * i), origin=i % 2 * 512) for i in range(5)])
        },
    )


def _store(name: str, m: Map, coordinates: tuple[int, ...], **more: Any) -> Case:
    rank = len(m.dims)
    size = image_bytes(m)
    box = Struct((*(i32(c) for c in (*coordinates, *(0,) * (5 - rank))), u32(size)))
    return Case(
        name=f"tma_store/{rank}d-{name}",
        module="tma_store",
        kernel=f"store_{rank}d",
        buffers={"tensor": _tensor(f"store/{name}", m), "image": raw(f"store/{name}/image", (size,), np.uint8)},
        outputs=("tensor",),
        args=(m, box, "image"),
        shared=size,
        expect=None
        if more.get("faults")
        else lambda given: {"tensor": store_box(given["tensor"], m, coordinates, given["image"])},
        **more,
    )


def _store_cases() -> Iterator[Case]:
    # Unlike a load, a store faults on a negative coordinate, and fills the last 16 bytes of a row that ends in them.
    line = Map("tensor", "u8", (201,), (), (64,))
    yield _store("clipped", line, (160,))
    yield _store("negative", line, (-32,), faults=True)
    yield _store("misaligned", line, (8,), faults=True)
    for swizzle, width in (("none", 64), ("32B", 16), ("64B", 32), ("128B", 64)):
        yield _store(f"{swizzle}-clipped", _matrix("bf16", (width, 8), swizzle, (72, 12)), (72 - width // 2, 7))
    yield _store("narrow-64B", _matrix("f32", (8, 8), "64B", (40, 10)), (36, 4))
    yield _store("negative-row", _matrix("f32", (32, 8), "128B", (40, 10)), (8, -2), faults=True)
    for columns in (41, 42, 43):
        yield _store(f"ragged-{columns}", _matrix("u16", (32, 4), dims=(columns, 6)), (24, 1))
    yield _store("outside", _matrix("u16", (32, 4), dims=(40, 6)), (48, 0))
    yield _store("rows-2", _matrix("u16", (32, 8), dims=(40, 12), element_strides=(1, 2)), (8, 3))
    yield _store("corner", Map("tensor", "u16", (20, 5, 4), (64, 320), (16, 4, 3), "32B"), (8, 3, 2))
    yield _store("corner", Map("tensor", "u32", (12, 5, 3, 2), (48, 240, 720), (4, 3, 2, 2)), (8, 3, 2, 1))
    five = Map("tensor", "u8", (48, 3, 2, 3, 2), (48, 144, 288, 864), (32, 2, 2, 2, 2), "32B")
    yield _store("corner", five, (32, 2, 1, 2, 1))
    yield _store("negative", five, (0, 0, 0, -1, 0), faults=True)


def cases() -> list[Case]:
    """All cases of this file."""
    return [*_load_cases(), *_store_cases()]
