"""Operands as Python callables, for instructions that are executed lane by lane or once for a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .ir import Address, Imm, Mem, Reg, Special, Vec
from .registry import Unsupported
from .special_registers import NAMES
from .warp import DTYPES

if TYPE_CHECKING:
    from .warp import Warp

Scalar = Callable[["Warp", int], int]
_LIST = {"p": "p", "h": "u16", "w": "u32", "d": "u64", "q": "q"}


def scalar(operand: object) -> Scalar:
    """`get(warp, lane)`: the unsigned bits that a lane holds; an address for a bracket; 128 bits as one integer."""
    if isinstance(operand, Imm):
        value = operand.value
        return lambda warp, lane: value
    if isinstance(operand, Mem):
        base, offset = scalar(operand.base), operand.offset
        return base if offset == 0 else (lambda warp, lane: base(warp, lane) + offset)
    if isinstance(operand, Address):
        space, at = operand.space, operand.offset
        return lambda warp, lane: warp.address(space, at)
    if isinstance(operand, Special):
        name = _special(operand)
        return lambda warp, lane: int(warp.special(name)[lane])
    if isinstance(operand, Reg):
        index, negated = operand.index, operand.negated
        if operand.cls == "q":
            return lambda warp, lane: int(warp.q[index][lane][0]) | int(warp.q[index][lane][1]) << 64
        rows = _LIST[operand.cls]
        if negated:
            return lambda warp, lane: int(not getattr(warp, rows)[index][lane])
        return lambda warp, lane: int(getattr(warp, rows)[index][lane])
    raise Unsupported(f"operand {operand!r}")


def _special(operand: Special) -> str:
    if operand.name not in NAMES:
        raise Unsupported(f"special register %{operand.name}")
    return operand.name


def signed(get: Scalar, bits: int = 32) -> Scalar:
    """The same as a signed number."""
    half, full = 1 << bits - 1, 1 << bits

    def read(warp: Warp, lane: int) -> int:
        value = get(warp, lane) & (full - 1)
        return value - full if value >= half else value

    return read


def vector(operand: object, kind: str = "u32") -> Callable[[Warp], np.ndarray]:
    """`get(warp)`: the values of all 32 lanes as an array of View list `kind` (u16, u32, s32, f32, u64, ...)."""
    if isinstance(operand, Reg):
        index = operand.index
        if operand.cls == "p":
            return (lambda warp: ~warp.p[index]) if operand.negated else (lambda warp: warp.p[index])
        if operand.cls == "h" and kind[1:] != "16":
            return lambda warp: warp.u16[index].astype(DTYPES[kind])
        return lambda warp: getattr(warp, kind)[index]
    if isinstance(operand, Imm):
        full = np.full(32, operand.value & ((1 << int(kind[1:])) - 1), np.dtype(f"u{int(kind[1:]) // 8}")).view(
            DTYPES[kind]
        )
        return lambda warp: full
    if isinstance(operand, Special):
        name = _special(operand)
        return lambda warp: warp.special(name).astype(DTYPES[kind])
    if isinstance(operand, (Address, Mem)):
        get = scalar(operand)
        if isinstance(operand, Mem) and isinstance(operand.base, Reg):
            base, offset = vector(operand.base, "u64" if operand.base.cls == "d" else "u32"), operand.offset
            return lambda warp: base(warp).astype(np.int64) + offset
        return lambda warp: np.full(32, get(warp, 0), np.int64)
    raise Unsupported(f"operand {operand!r}")


def row(warp: Warp, register: Reg) -> np.ndarray:
    """The raw values of a register, one a lane: bool, or unsigned; a live view."""
    return getattr(warp, _LIST[register.cls])[register.index]


def lanes(mask: np.ndarray | None) -> list[int]:
    """Active lanes in ascending order. None = all 32."""
    return _ALL if mask is None else np.flatnonzero(mask).tolist()


_ALL = list(range(32))


def first_lane(mask: np.ndarray | None) -> int:
    return 0 if mask is None else int(np.argmax(mask))


def registers(operand: object) -> list[int]:
    """Register numbers of a vector operand (or of one register); all of one class."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if not all(isinstance(r, Reg) for r in items):
        raise Unsupported(f"a vector of registers is needed, not {operand!r}")
    return [r.index for r in items]


def immediate(operand: object, name: str) -> int:
    if not isinstance(operand, Imm):
        raise Unsupported(f"{name} must be an immediate, not {operand!r}")
    return operand.value
