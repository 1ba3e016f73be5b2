"""atom and red on global and shared memory, and the multi-element red. PTX ISA 9.7.13.

Lanes take their turns in ascending order, which is one of the orders the hardware may choose. Floating additions round
as the type says; f16 and bf16 through float32 (one rounding: the sum of two is exact there or rounds alike).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .. import access, formats
from ..ir import SIZES, Instruction, Kernel, Reg, Vec
from ..operands import row, scalar, vector
from ..registry import Unsupported, special
from .memory_access import count_of, order_of, space_of

if TYPE_CHECKING:
    from ..warp import Warp

OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")
_DTYPES = {
    **{k: np.dtype(k2) for k, k2 in (("u32", "u4"), ("b32", "u4"), ("s32", "i4"), ("f32", "f4"), ("b16", "u2"))},
    **{k: np.dtype(k2) for k, k2 in (("u64", "u8"), ("b64", "u8"), ("s64", "i8"), ("f64", "f8"), ("f16", "f2"))},
}

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


def combine(operation: str, kind: str) -> Combine:
    """`f(old, operand)` on raw unsigned words: elementwise, the result as raw words. Raises Unsupported.

    Shared by atomics, bulk reductions and tensor reductions.
    """
    if kind in ("bf16", "bf16x2", "f16x2", "f16"):
        return _half(operation, kind)
    if kind not in _DTYPES:
        raise Unsupported(f"atomic .{operation} on .{kind}")
    dtype = _DTYPES[kind]
    floating = dtype.kind == "f"
    table: dict[str, Callable] = {
        "add": np.add,
        "min": np.fmin if floating else np.minimum,
        "max": np.fmax if floating else np.maximum,
        "exch": lambda old, new: new,
    }
    if not floating:
        table |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "inc": _inc, "dec": _dec}
    if operation not in table:
        raise Unsupported(f"atomic .{operation} on .{kind}")
    function = table[operation]
    raw = np.dtype(f"u{dtype.itemsize}")

    def run(old: np.ndarray, operand: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(function(old.view(dtype), operand.view(dtype)), dtype).view(raw)

    return run


def flushing(operation: str, kind: str) -> Combine:
    """`combine`, but f32 additions flush subnormals to zero of their sign.

    So do atomics on global memory and bulk reductions; atomics on shared memory do not (PTX ISA 9.7.13.5).
    """
    inner = combine(operation, kind)
    if (operation, kind) != ("add", "f32"):
        return inner
    return lambda old, operand: _flush(inner(_flush(old), _flush(operand)))


def _flush(words: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(words).view(np.float32)
    small = np.abs(values) < np.finfo(np.float32).smallest_normal
    return np.where(small, np.copysign(np.float32(0), values), values).view(np.uint32)


def _inc(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, 0, old + 1).astype(old.dtype)


def _dec(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - 1).astype(old.dtype)


def _half(operation: str, kind: str) -> Combine:
    functions = {"add": np.add, "min": np.fmin, "max": np.fmax}
    if operation not in functions:
        raise Unsupported(f"atomic .{operation} on .{kind}")
    function = functions[operation]

    def run(old: np.ndarray, operand: np.ndarray) -> np.ndarray:
        a, b = old.view(np.uint16), operand.view(np.uint16)
        with np.errstate(all="ignore"):
            if kind.startswith("bf16"):
                result = formats.f32_to_bf16(function(formats.bf16_to_f32(a), formats.bf16_to_f32(b)))
            else:
                wide = function(a.view(np.float16).astype(np.float32), b.view(np.float16).astype(np.float32))
                result = wide.astype(np.float16).view(np.uint16)
        return np.ascontiguousarray(result).view(old.dtype)

    return run


@special("atom", "red")
def build(kernel: Kernel, i: Instruction) -> Callable[[Warp, np.ndarray | None], None]:
    if "async" in i.mods:
        raise Unsupported("red.async is an instruction of its own")
    operation = next((m for m in i.mods if m in OPERATIONS), "")
    if not operation:
        raise Unsupported(f"atomic operation of {i.name}")
    returns = i.op == "atom"
    memory = i.args[1 if returns else 0]
    operands = i.args[2 if returns else 1 :]
    count = count_of(i)
    # A trailing 64-bit register is the cache policy.
    wanted = 2 if operation == "cas" else 1
    operands = operands[:wanted]
    kind, size = i.type, SIZES[i.type]
    order = order_of(i) or "relaxed"
    spec = access.Spec(i, space_of(i), size if size < 16 else 8, count if size < 16 else 2, True, order)
    if size == 16:
        return _wide(i, spec, memory, operands, operation)
    addresses = vector(memory)
    columns = [[vector(e, f"u{8 * max(size, 2)}") for e in (o.items if isinstance(o, Vec) else (o,))] for o in operands]
    in_shared = None if operation == "cas" else combine(operation, kind)
    in_global = None if operation == "cas" else flushing(operation, kind)
    destinations = _destinations(i.args[0]) if returns else []

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        where, offsets = access.locate(warp, mask, spec, addresses(warp).astype(np.int64))
        words = where.views[size]
        function = in_global if where.name == "global" else in_shared
        index = offsets // size
        active = warp.lanes if mask is None else warp.lanes[mask]
        distinct = len(set(index.tolist())) == len(index)
        for k in range(count):
            new = columns[0][k](warp)[active]
            at = index + k
            if distinct:
                old = words[at]
                if function is None:
                    words[at] = np.where(old == new, columns[1][k](warp)[active], old)
                else:
                    words[at] = function(old, np.ascontiguousarray(new))
            else:
                swap = columns[1][k](warp)[active] if function is None else None
                old = _in_turn(words, at, new, swap, function)
            target = destinations[k] if returns else None
            if target is not None:
                row(warp, target)[active] = old

    return run


def _in_turn(
    words: np.ndarray, at: np.ndarray, new: np.ndarray, swap: np.ndarray | None, function: Callable | None
) -> np.ndarray:
    """Lanes one after the other; returns what each found."""
    old = np.empty(len(at), words.dtype)
    for n, place in enumerate(at.tolist()):
        old[n] = words[place]
        if function is None:
            assert swap is not None
            if old[n] == new[n]:
                words[place] = swap[n]
        else:
            words[place] = function(old[n : n + 1].copy(), np.ascontiguousarray(new[n : n + 1]))[0]
    return old


def _destinations(operand: object) -> list[Reg | None]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    return [o if isinstance(o, Reg) else None for o in items]


def _wide(i: Instruction, spec: access.Spec, memory: object, operands: tuple, operation: str) -> Callable:
    """128-bit exch and cas."""
    if operation not in ("exch", "cas"):
        raise Unsupported(f"atomic .{operation} on .b128")
    get = [scalar(o) for o in operands]
    addresses = vector(memory)
    destination = i.args[0] if i.op == "atom" else None

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        where, offsets = access.locate(warp, mask, spec, addresses(warp).astype(np.int64))
        active = warp.lanes if mask is None else warp.lanes[mask]
        for lane, offset in zip(active.tolist(), offsets.tolist(), strict=True):
            words = where.u64[offset // 8 : offset // 8 + 2]
            old = words.copy()
            value = get[0](warp, lane)
            if operation == "cas":
                if (int(old[0]) | int(old[1]) << 64) == value:
                    value = get[1](warp, lane)
                    words[:] = value & (2**64 - 1), value >> 64
            else:
                words[:] = value & (2**64 - 1), value >> 64
            if isinstance(destination, Reg):
                warp.q[destination.index][lane] = old

    return run
