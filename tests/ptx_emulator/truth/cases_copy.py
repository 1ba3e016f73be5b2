"""Reductions through tensor maps and in bulk, bulk copies, cp.async."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .case import Arrays, Case, Map, Struct, i32, integers, raw, u32, untouched
from .driver import ELEMENTS
from .exact import BF16, F16, from_integers
from .images import box_bytes, store_box

BULK_REDUCTIONS = (
    *("add_f32", "add_f64", "add_f16", "add_bf16", "max_bf16", "min_f16", "add_u32", "add_s32", "add_u64"),
    *("min_u32", "min_s32", "max_s64", "inc_u32", "dec_u32", "and_b32", "or_b32", "xor_b64"),
)
# The reductions on integers; the wrap-around ones as in PTX (inc and dec compare without sign).
_COMBINE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_TYPES: dict[str, type[np.generic]] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
}
_HALVES = {"f16": F16, "bf16": BF16}


def _values(seed: str, shape: tuple[int, ...], element: str, operation: str) -> np.ndarray:
    """Data for a reduction: bits of small integers for floating point, else random bits."""
    if element in _HALVES:
        return from_integers(integers(seed, shape, -60, 60), _HALVES[element])
    if element in ("f32", "f64"):
        return integers(seed, shape, -5000, 5000).astype(_TYPES[element])
    if operation in ("inc", "dec"):
        return integers(seed, shape, 0, 5).astype(_TYPES[element])
    return raw(seed, shape, _TYPES[element])


def _reduced(old: np.ndarray, new: np.ndarray, element: str, operation: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        if element in _HALVES:
            form = _HALVES[element]
            table = from_integers(np.arange(-512, 513), form)
            order = np.argsort(table)
            back = np.arange(-512, 513)[order]
            plain = [back[np.searchsorted(table[order], v)] for v in (old, new)]
            return from_integers(_COMBINE[operation](*plain), form)
        return _COMBINE[operation](old, new).astype(old.dtype)


def _tensor_reduction(operation: str, element: str, blocks: int, columns: int = 0) -> Case:
    """A box that reaches over the last row, and over the last of `columns` columns where those are given."""
    size = ELEMENTS[element][1]
    wide = 16 if size < 8 else 8
    m = Map("tensor", element, (columns or 24, 6), (32 * size,), (wide, 4), "none" if size < 4 else "64B")
    seed = f"reduce/{operation}/{element}"
    at = (8, 3)

    def expect(given: Arrays) -> Arrays:
        old = given["tensor"]
        placed = store_box(np.zeros_like(old), m, at, given["image"].view(np.uint8).reshape(-1))
        hit = store_box(np.zeros_like(old).view(np.uint8), m, at, np.full(box_bytes(m), 1, np.uint8))
        touched = hit.reshape(*old.shape, -1).any(axis=2)
        new: np.ndarray = old
        for _ in range(blocks):
            new = np.where(touched, _reduced(new, placed, element, operation), new)
        return {"tensor": new}

    return Case(
        name=f"tma_store/reduce-{operation}-{element}" + (f"-ragged-{columns}" if columns else ""),
        module="tma_store",
        kernel=f"reduce_{operation}_2d",
        buffers={
            "tensor": _values(f"{seed}/old", (6, 32), element, operation),
            "image": _values(f"{seed}/new", (4, wide), element, operation),
        },
        outputs=("tensor",),
        args=(m, Struct((*(i32(c) for c in (*at, 0, 0, 0)), u32(box_bytes(m)))), "image"),
        grid=(blocks, 1, 1),
        shared=box_bytes(m),
        expect=expect,
    )


def _tensor_reductions() -> Iterator[Case]:
    for operation, element, blocks in (
        ("add", "f32", 3),
        ("add", "f16", 2),
        ("add", "bf16", 2),
        ("add", "u32", 3),
        ("add", "s32", 1),
        ("add", "u64", 1),
        ("min", "u32", 2),
        ("min", "s32", 1),
        ("max", "u32", 1),
        ("max", "s32", 1),
        ("max", "s64", 1),
        ("min", "f16", 1),
        ("max", "bf16", 2),
        ("inc", "u32", 1),
        ("dec", "u32", 1),
        ("and", "u32", 1),
        ("or", "u32", 1),
        ("xor", "u64", 1),
    ):
        yield _tensor_reduction(operation, element, blocks)
    for element, columns in (
        ("f16", 17),
        ("f16", 20),
        ("f16", 23),
        ("u32", 17),
        ("u32", 18),
        ("u32", 19),
        ("u64", 11),
        ("f32", 18),
    ):
        yield _tensor_reduction("add", element, 1, columns)


def _bulk_copy(size: int, shared_offset: int, start: int, faults: bool = False) -> Case:
    def expect(given: Arrays) -> Arrays:
        return {"out": np.concatenate([given["in"][start:], given["out"][-16:]])}

    return Case(
        name=f"bulk/copy-{size}" + (f"-misaligned-{shared_offset}-{start}" if faults else ""),
        module="bulk",
        kernel="bulk_copy",
        buffers={"in": raw(f"bulk/{size}", (start + size,), np.uint8), "out": untouched((size + 16,), np.uint8)},
        outputs=("out",),
        args=("in", "out", u32(size), u32(shared_offset), u32(start)),
        shared=size + shared_offset,
        expect=None if faults else expect,
        faults=faults,
    )


def _bulk_cases() -> Iterator[Case]:
    yield _bulk_copy(16, 0, 0)
    yield _bulk_copy(1040, 48, 32)
    yield _bulk_copy(4096, 16, 0)
    yield _bulk_copy(32, 8, 0, faults=True)
    yield _bulk_copy(32, 0, 8, faults=True)
    for name in BULK_REDUCTIONS:
        operation, element = name.split("_")
        blocks = 1 if operation in ("inc", "dec") else 3
        old = _values(f"bulk/{name}/old", (48,), element, operation)
        new = _values(f"bulk/{name}/new", (blocks, 48), element, operation)

        def expect(given: Arrays, element: str = element, operation: str = operation) -> Arrays:
            out = given["out"]
            for row in given["in"]:
                out = _reduced(out, row, element, operation)
            return {"out": out}

        yield Case(
            name=f"bulk/reduce-{operation}-{element}",
            module="bulk",
            kernel=f"bulk_{name}",
            buffers={"in": new, "out": old},
            outputs=("out",),
            args=("in", "out", u32(old.nbytes)),
            grid=(blocks, 1, 1),
            shared=old.nbytes,
            expect=expect,
        )


def _cp_async_cases() -> Iterator[Case]:
    sizes = np.stack([integers(f"sizes/{i}", (64,), 0, limit) for i, limit in enumerate((4, 8, 16, 16))])
    sizes[:, :2] = [[0, 4], [0, 8], [0, 16], [0, 16]]

    def copied(given: Arrays) -> Arrays:
        out = np.full((4, 64, 16), 0xA5, np.uint8)
        for row, whole in enumerate((4, 8, 16, 16)):
            for t in range(64):
                part = int(given["sizes"][row, t])
                out[row, t, :whole] = 0
                out[row, t, :part] = given["in"][row, t, :part]
        return {"out": out}

    yield Case(
        name="cp_async/sizes",
        module="cp_async",
        kernel="copy_sizes",
        buffers={
            "in": raw("cp_async/sizes", (4, 64, 16), np.uint8),
            "sizes": sizes.astype(np.uint32),
            "out": untouched((4, 64, 16), np.uint8),
        },
        outputs=("out",),
        args=("in", "sizes", "out"),
        block=(64, 1, 1),
        expect=copied,
    )
    ignore = integers("ignore", (5, 64), 0, 3) // 3
    yield Case(
        name="cp_async/groups",
        module="cp_async",
        kernel="copy_groups",
        buffers={
            "in": raw("cp_async/groups", (5, 64, 16), np.uint8),
            "ignore": ignore.astype(np.uint32),
            "out": untouched((5, 64, 16), np.uint8),
        },
        outputs=("out",),
        args=("in", "ignore", "out", u32(5)),
        block=(64, 1, 1),
        expect=lambda given: {"out": np.where(given["ignore"][:, :, None] != 0, np.uint8(0), given["in"])},
    )
    for noinc in (0, 1):
        yield Case(
            name=f"cp_async/arrive-{'noinc' if noinc else 'inc'}",
            module="cp_async",
            kernel="copy_arrive",
            buffers={"in": raw("cp_async/arrive", (64, 16), np.uint8), "out": untouched((64, 16), np.uint8)},
            outputs=("out",),
            args=("in", "out", u32(noinc)),
            block=(64, 1, 1),
            expect=lambda given: {"out": given["in"]},
        )


def cases() -> list[Case]:
    """All cases of this file."""
    return [*_tensor_reductions(), *_bulk_cases(), *_cp_async_cases()]
