"""Instructions in which the lanes of a warp look at each other: shfl, vote, match, redux, elect, activemask.

They are executed by the lanes that are there together. A member mask with lanes that are elsewhere is waited for where
those are on their way, and a finding where they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConvergenceError
from ..ir import Imm, Instruction, Kernel, Pair, Reg, Sink
from ..operands import lanes, row, vector
from ..registry import WAIT, Unsupported, special

if TYPE_CHECKING:
    from ..warp import Warp

_LANES = np.arange(32)


def gather(warp: Warp, mask: np.ndarray | None, want: int, i: Instruction) -> bool:
    """True when all members execute this together. False = wait for those that are on their way."""
    have = warp.bits(mask)
    if want & warp.live & ~have:
        if len(warp.fragments) > 1:
            warp.waiting = f"{i.op} with members {want:#x}: lanes {want & warp.live & ~have:#x} are elsewhere"
            return False
        warp.cta.report(
            ConvergenceError, f"{warp.label}: {i.op} with members {want:#x}, executed by {have:#x}\n  {i.where()}"
        )
    if warp.actor is not None and not warp.cta.launch.options.strict:
        # The ISA promises no memory order here; lanes do meet, and compilers rely on it.
        warp.actor.synchronise(have)
    return True


Parts = list[tuple[int, "np.ndarray | None"]]


def by_members(operand: object) -> Callable[[Warp, np.ndarray | None], Parts]:
    """`get(warp, mask)`: (member mask, the lanes that name it). Groups of lanes with masks of their own may meet."""
    if isinstance(operand, Imm):
        number = operand.value & 0xFFFFFFFF
        return lambda warp, mask: [(number, mask)]
    read = vector(operand)

    def split(warp: Warp, mask: np.ndarray | None) -> Parts:
        values = read(warp)
        active = values if mask is None else values[mask]
        if (active == active[0]).all():
            return [(int(active[0]), mask)]
        found = sorted(set(active.tolist()))
        return [(n, values == n if mask is None else (values == n) & mask) for n in found]

    return split


def _gathered(warp: Warp, parts: Parts, i: Instruction) -> bool:
    return all([gather(warp, mask, want, i) for want, mask in parts])


def put(warp: Warp, operand: object, values: np.ndarray, mask: np.ndarray | None) -> None:
    """Writes a destination register of any class, active lanes only."""
    if isinstance(operand, Sink):
        return
    if not isinstance(operand, Reg):
        raise TypeError(operand)
    target = row(warp, operand)
    if mask is None:
        target[:] = values
    else:
        target[mask] = values[mask]


def _pair(operand: object) -> tuple[object, object | None]:
    """Destination and predicate of `d|p`, or the destination alone."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


@special("shfl", kind=WAIT)
def shuffle(kernel: Kernel, i: Instruction) -> Callable:
    """shfl(.sync).{up,down,bfly,idx}.b32: out-of-range lanes keep their own value, predicate false. PTX ISA 9.7.9.6."""
    mode = next(m for m in i.mods if m in ("up", "down", "bfly", "idx"))
    destination, predicate = _pair(i.args[0])
    value, b, c = (vector(a) for a in i.args[1:4])
    members = by_members(i.args[4] if i.has("sync") else Imm(0))
    fixed = _sources(mode, i)

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        if not _gathered(warp, members(warp, mask), i):
            return False
        source, inside = fixed if fixed is not None else _lane_sources(mode, b(warp), c(warp))
        put(warp, destination, value(warp)[source], mask)
        if predicate is not None:
            put(warp, predicate, inside, mask)
        return True

    return run


def _sources(mode: str, i: Instruction) -> tuple[np.ndarray, np.ndarray] | None:
    """The lanes read, where lane and clamp operands are immediates."""
    if isinstance(i.args[2], Imm) and isinstance(i.args[3], Imm):
        return _lane_sources(mode, np.full(32, i.args[2].value & 31), np.full(32, i.args[3].value))
    return None


def _lane_sources(mode: str, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    b = b.astype(np.int64) & 31
    clamp, segment = c.astype(np.int64) & 31, c.astype(np.int64) >> 8 & 31
    top = (_LANES & segment) | (clamp & ~segment)
    low = _LANES & segment
    if mode == "up":
        source = _LANES - b
        inside = source >= top
    elif mode == "down":
        source = _LANES + b
        inside = source <= top
    elif mode == "bfly":
        source = _LANES ^ b
        inside = source <= top
    else:
        source = low | (b & ~segment)
        inside = source <= top
    return np.where(inside, source, _LANES), inside


@special("vote", kind=WAIT)
def vote(kernel: Kernel, i: Instruction) -> Callable:
    """vote(.sync).{all,any,uni}.pred, .ballot.b32."""
    mode = next((m for m in i.mods if m in ("all", "any", "uni", "ballot")), "")
    if not mode:
        raise Unsupported(i.name)
    source = vector(i.args[1])
    members = by_members(i.args[2]) if i.has("sync") else None

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        parts = members(warp, mask) if members is not None else [(warp.bits(mask), mask)]
        if not _gathered(warp, parts, i):
            return False
        held = source(warp).copy()
        for want, part in parts:
            active = [lane for lane in lanes(part) if want >> lane & 1]
            own = held[np.array(active, dtype=np.int64)]
            if mode == "ballot":
                bits = sum(1 << lane for lane in active if held[lane])
                put(warp, i.args[0], np.full(32, bits, np.uint32), part)
            else:
                result = bool({"all": own.all(), "any": own.any(), "uni": own.all() or not own.any()}[mode])
                put(warp, i.args[0], np.full(32, result), part)
        return True

    return run


@special("match", kind=WAIT)
def match(kernel: Kernel, i: Instruction) -> Callable:
    """match.{any,all}.sync.{b32,b64}."""
    every = i.has("all")
    destination, predicate = _pair(i.args[0])
    value, members = vector(i.args[1], "u64" if i.type == "b64" else "u32"), by_members(i.args[2])

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        parts = members(warp, mask)
        if not _gathered(warp, parts, i):
            return False
        values = value(warp)
        result, equal = np.zeros(32, np.uint32), np.zeros(32, bool)
        for want, part in parts:
            active = [lane for lane in lanes(part) if want >> lane & 1]
            if every:
                same = len({int(values[lane]) for lane in active}) == 1
                result[active] = sum(1 << lane for lane in active) if same else 0
                equal[active] = same
            else:
                for lane in active:
                    result[lane] = sum(1 << other for other in active if values[other] == values[lane])
        put(warp, destination, result, mask)
        if predicate is not None:
            put(warp, predicate, equal, mask)
        return True

    return run


@special("redux", kind=WAIT)
def redux(kernel: Kernel, i: Instruction) -> Callable:
    """redux.sync.{add,min,max,and,or,xor} on 32-bit integers; min and max (.abs, .NaN) on f32."""
    operation = next(m for m in i.mods if m in ("add", "min", "max", "and", "or", "xor"))
    kind = i.type
    functions: dict[str, np.ufunc] = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    rows = {"s32": "s32", "f32": "f32"}.get(kind, "u32")
    value, members = vector(i.args[1], rows), by_members(i.args[2])
    if operation in ("min", "max"):
        if kind == "f32":
            function = {"min": np.minimum, "max": np.maximum} if i.has("NaN") else {"min": np.fmin, "max": np.fmax}
        else:
            function = {"min": np.minimum, "max": np.maximum}
        functions = {**functions, **function}
    elif kind == "f32":
        raise Unsupported("redux on f32 has min and max only")

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        parts = members(warp, mask)
        if not _gathered(warp, parts, i):
            return False
        held = value(warp).copy()
        for want, part in parts:
            values = held[[lane for lane in lanes(part) if want >> lane & 1]]
            if i.has("abs"):
                values = np.abs(values)
            with np.errstate(over="ignore"):
                result = functions[operation].reduce(values, dtype=values.dtype)
            put(warp, i.args[0], np.full(32, result, values.dtype).view(np.uint32), part)
        return True

    return run


@special("elect", kind=WAIT)
def elect(kernel: Kernel, i: Instruction) -> Callable:
    """elect.sync d|p, members: the lowest member is the leader (the ISA leaves open which)."""
    target = i.args[0]
    if not isinstance(target, Pair):
        raise Unsupported("elect.sync needs d|p")
    members = by_members(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        parts = members(warp, mask)
        if not _gathered(warp, parts, i):
            return False
        for want, part in parts:
            able = want & warp.bits(part)
            leader = (able & -able).bit_length() - 1
            put(warp, target.first, np.full(32, leader, np.uint32), part)
            put(warp, target.second, np.equal(_LANES, leader), part)
        return True

    return run


@special("activemask")
def activemask(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        put(warp, i.args[0], np.full(32, warp.bits(mask), np.uint32), mask)

    return run
