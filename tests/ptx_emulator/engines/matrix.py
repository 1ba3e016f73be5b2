"""ldmatrix, stmatrix, movmatrix: matrices between shared memory and a warp's registers. PTX ISA 9.7.14.5.15 to 17.

A row of a matrix is 16 bytes of shared memory, at an address that one lane supplies: with .xN, lane 8 j + r that of
row r of matrix j (j = 0..N-1); the other lanes' addresses are not looked at. Register j of lane t then holds

    .m8n8.b16           elements (t / 4, 2 (t % 4) + s), s = 0, 1                 .trans: (2 (t % 4) + s, t / 4)
    .m8n16 (decoded)    elements (t / 4, 4 (t % 4) + s), s = 0..3                 4- and 6-bit elements, a byte each
    .m16n8.trans.b8     stmatrix: elements (t / 4 + 8 (s / 2), 2 (t % 4) + s % 2) of 16x8; memory holds its columns

The accesses are those of ordinary loads and stores (generic proxy, weak), so access.load and access.store do them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .. import access
from ..ir import Instruction, Mem
from ..lower.memory_access import space_of
from ..operands import registers
from ..registry import Unsupported, generated
from ..warp import WARP
from .tensor_core import whole_warps

if TYPE_CHECKING:
    from ..lower.code import Code
    from ..warp import View

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_SPACES = ("shared", "shared::cta")


def _modifiers(i: Instruction, shapes: dict[str, frozenset[str]]) -> tuple[str, int, frozenset[str]]:
    """(shape, matrices, the other modifiers). `shapes` maps a shape to the modifiers that may stand with it."""
    rest = set(i.mods)
    if not {"sync", "aligned"} <= rest:
        raise Unsupported(f"{i.op} without .sync.aligned")
    rest -= {"sync", "aligned", *_SPACES}
    shape = next((s for s in shapes if s in rest), "")
    count = next((n for n in _COUNTS if n in rest), "")
    if not shape or not count:
        raise Unsupported(
            f"shape .{shape or '?'} and count .{count or '?'}; {', '.join(shapes)} with x1, x2, x4 are modelled"
        )
    rest -= {shape, count}
    if not rest <= shapes[shape]:
        raise Unsupported(f"modifiers .{'.'.join(sorted(rest))}; with .{shape} allowed: {sorted(shapes[shape])}")
    return shape, _COUNTS[count], frozenset(rest)


def _registers(i: Instruction, operand: object, count: int) -> list[int]:
    rows = registers(operand)
    if len(rows) != count:
        raise Unsupported(f"{len(rows)} registers; {i.op} of {count} matrices needs {count}")
    return rows


def _memory(i: Instruction, operand: object, write: bool) -> tuple[Mem, access.Spec]:
    if not isinstance(operand, Mem):
        raise Unsupported(f"{operand!r}: an address in brackets is needed")
    return operand, access.Spec(i, space_of(i), 4, 4, write, "")


@lru_cache(maxsize=16)
def _suppliers(count: int, warps: int) -> np.ndarray | None:
    """Mask of the lanes whose addresses count; None where all do."""
    if count == 4:
        return None
    return np.tile(np.arange(WARP) < 8 * count, warps)


def _decode_rows(rows: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [n, 4] of packed 4- or 6-bit elements, 16 in a row from its low bits on, into a byte each [n, 4 words]."""
    stream = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")[:, : 16 * bits]
    wide = np.zeros((len(rows), 16, 8), np.uint8)
    wide[:, :, :bits] = stream.reshape(len(rows), 16, bits)
    return np.packbits(wide.reshape(len(rows), 128), axis=1, bitorder="little").view(np.uint32)


def transpose(words: np.ndarray) -> np.ndarray:
    """uint32 [..., 8 rows, 4] of 8x8 matrices with 16-bit elements, transposed."""
    elements = words.view(np.uint16)
    return np.ascontiguousarray(elements.swapaxes(-1, -2)).view(np.uint32)


# ldmatrix -------------------------------------------------------------------------------------------------------------
_LOADS = {
    "m8n8": frozenset(("trans", "b16")),
    "m8n16": frozenset(("b8x16", "b6x16_p32", "b4x16_p64")),
}


def build_load(i: Instruction) -> tuple[Mem, Callable[[View, np.ndarray | None, np.ndarray | int], None]]:
    """(address operand, `run(view, mask, address)`)."""
    if "m16n16" in i.mods:
        raise Unsupported("ldmatrix .m16n16: the sources disagree on which byte of which register holds an element")
    shape, count, rest = _modifiers(i, _LOADS)
    bits = next((n for name, n in (("b6x16_p32", 6), ("b4x16_p64", 4)) if name in rest), 0)
    if shape == "m8n16" and (not bits or "b8x16" not in rest):
        raise Unsupported("ldmatrix .m8n16 without .b8x16 and .b6x16_p32 or .b4x16_p64")
    if shape == "m8n8" and "b16" not in rest:
        raise Unsupported("ldmatrix .m8n8 without .b16")
    destination = _registers(i, i.args[0], count)
    memory, spec = _memory(i, i.args[1], False)

    def load(view: View, address: np.ndarray | int) -> None:
        warps = view.width // WARP
        rows = access.load(view, _suppliers(count, warps), spec, address)
        words = _decode_rows(rows, bits) if bits else rows
        words = words.reshape(warps, count, 8, 4)
        if "trans" in rest:
            words = transpose(words)
        view.file("w")[destination] = words.transpose(1, 0, 2, 3).reshape(count, view.width)

    def run(view: View, mask: np.ndarray | None, address: np.ndarray | int) -> None:
        for part in whole_warps(view, mask, i):
            load(part, address if part is view else _part(view, part, address))

    return memory, run


def _part(view: View, warp: View, address: np.ndarray | int) -> np.ndarray | int:
    if not isinstance(address, np.ndarray):
        return address
    start = warp.start - view.start
    return address[start : start + warp.width]


@generated("ldmatrix")
def ldmatrix(code: Code, i: Instruction) -> None:
    memory, run = build_load(i)
    code.line(f"{code.helper(run)}(v,{code.mask},{code.address(memory)})")


# stmatrix -------------------------------------------------------------------------------------------------------------
_STORES = {"m8n8": frozenset(("trans", "b16")), "m16n8": frozenset(("trans", "b8"))}


def columns_of_16x8(words: np.ndarray) -> np.ndarray:
    """uint32 [..., 8 lane groups, 4] fragments of 16x8 matrices of bytes into their columns, [..., 8, 4 words]."""
    fragment = words.view(np.uint8).reshape(*words.shape, 2, 2)  # [..., g, q, upper half, column % 2]
    lead = tuple(range(fragment.ndim - 4))
    g, q, half, odd = range(fragment.ndim - 4, fragment.ndim)
    columns = np.ascontiguousarray(fragment.transpose(*lead, q, odd, half, g))
    return columns.reshape(*words.shape[:-2], 8, 16).view(np.uint32)


def build_store(i: Instruction) -> tuple[Mem, Callable[[View, np.ndarray | None, np.ndarray | int], None]]:
    """(address operand, `run(view, mask, address)`)."""
    shape, count, rest = _modifiers(i, _STORES)
    if shape == "m16n8" and rest != {"trans", "b8"}:
        raise Unsupported("stmatrix .m16n8 without .trans.b8")
    if shape == "m8n8" and "b16" not in rest:
        raise Unsupported("stmatrix .m8n8 without .b16")
    source = _registers(i, i.args[1], count)
    memory, spec = _memory(i, i.args[0], True)

    def store(view: View, address: np.ndarray | int) -> None:
        warps = view.width // WARP
        words = view.file("w")[source].reshape(count, warps, 8, 4)
        if shape == "m16n8":
            words = columns_of_16x8(words)
        elif "trans" in rest:
            words = transpose(words)
        padded = np.zeros((warps, WARP, 4), np.uint32)
        padded[:, : 8 * count] = words.transpose(1, 0, 2, 3).reshape(warps, 8 * count, 4)
        rows = padded.reshape(view.width, 4)
        access.store(view, _suppliers(count, warps), spec, address, [rows[:, k] for k in range(4)])

    def run(view: View, mask: np.ndarray | None, address: np.ndarray | int) -> None:
        for part in whole_warps(view, mask, i):
            store(part, address if part is view else _part(view, part, address))

    return memory, run


@generated("stmatrix")
def stmatrix(code: Code, i: Instruction) -> None:
    memory, run = build_store(i)
    code.line(f"{code.helper(run)}(v,{code.mask},{code.address(memory)})")


# movmatrix ------------------------------------------------------------------------------------------------------------
@generated("movmatrix")
def movmatrix(code: Code, i: Instruction) -> None:
    """movmatrix.sync.aligned.m8n8.trans.b16 d, a: the transposed 8x8 matrix."""
    if i.mods != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise Unsupported("movmatrix.sync.aligned.m8n8.trans.b16 is the only form")
    (destination,), (source,) = registers(i.args[0]), registers(i.args[1])

    def run(view: View, mask: np.ndarray | None) -> None:
        for part in whole_warps(view, mask, i):
            words = np.ascontiguousarray(part.file("w")[source]).reshape(-1, 8, 4)
            part.file("w")[destination] = transpose(words).reshape(-1)

    code.line(f"{code.helper(run)}(v,{code.mask})")
