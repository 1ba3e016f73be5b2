"""Instructions in which the lanes of a warp look at each other: shfl, vote, match, redux, elect, activemask.

They are executed by the lanes that are there together. A member mask with lanes that are elsewhere is waited for where
those are on their way, and a finding where they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConvergenceError
from ..ir import Instruction, Kernel, Pair, Reg, Sink
from ..lower.registry import WAIT, Unsupported, special
from ..operands import first_lane, lanes, scalar, vector

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


def put(warp: Warp, operand: object, values: np.ndarray, mask: np.ndarray | None) -> None:
    """Writes a destination register of any class, active lanes only."""
    if isinstance(operand, Sink):
        return
    if not isinstance(operand, Reg):
        raise TypeError(operand)
    rows = {"p": "p", "h": "u16", "w": "u32", "d": "u64"}[operand.cls]
    row = getattr(warp, rows)[operand.index]
    if mask is None:
        row[:] = values
    else:
        row[mask] = values[mask] if np.ndim(values) else values


@special("shfl", kind=WAIT)
def shuffle(kernel: Kernel, i: Instruction) -> Callable:
    """shfl(.sync).{up,down,bfly,idx}.b32: out-of-range lanes keep their own value, predicate false. PTX ISA 9.7.9.6."""
    mode = next(m for m in i.mods if m in ("up", "down", "bfly", "idx"))
    destination = i.args[0]
    predicate = None
    if isinstance(destination, Pair):
        destination, predicate = destination.first, destination.second
    value, b, c = (vector(a) for a in i.args[1:4])
    members = scalar(i.args[4]) if i.has("sync") else (lambda warp, lane: warp.live)
    fixed = _sources(mode, i)

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        if not gather(warp, mask, members(warp, first_lane(mask)) if i.has("sync") else 0, i):
            return False
        source, inside = fixed if fixed is not None else _lane_sources(mode, b(warp), c(warp))
        put(warp, destination, value(warp)[source], mask)
        if predicate is not None:
            put(warp, predicate, inside, mask)
        return True

    return run


def _sources(mode: str, i: Instruction) -> tuple[np.ndarray, np.ndarray] | None:
    """The lanes read, where lane and clamp operands are immediates."""
    from ..ir import Imm

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
    members = scalar(i.args[2]) if i.has("sync") else None

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        want = members(warp, first_lane(mask)) if members is not None else warp.bits(mask)
        if not gather(warp, mask, want, i):
            return False
        own = source(warp)[np.array([lane for lane in lanes(mask) if want >> lane & 1], dtype=np.int64)]
        if mode == "ballot":
            bits = sum(1 << lane for lane in lanes(mask) if want >> lane & 1 and source(warp)[lane])
            put(warp, i.args[0], np.full(32, bits, np.uint32), mask)
        else:
            result = bool({"all": own.all(), "any": own.any(), "uni": own.all() or not own.any()}[mode])
            put(warp, i.args[0], np.full(32, result), mask)
        return True

    return run


@special("match", kind=WAIT)
def match(kernel: Kernel, i: Instruction) -> Callable:
    """match.{any,all}.sync.{b32,b64}."""
    every = i.has("all")
    destination, predicate = i.args[0], None
    if isinstance(destination, Pair):
        destination, predicate = destination.first, destination.second
    value, members = vector(i.args[1], "u64" if i.type == "b64" else "u32"), scalar(i.args[2])

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        want = members(warp, first_lane(mask))
        if not gather(warp, mask, want, i):
            return False
        values = value(warp)
        active = [lane for lane in lanes(mask) if want >> lane & 1]
        result, equal = np.zeros(32, np.uint32), np.zeros(32, bool)
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
    functions = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    rows = {"s32": "s32", "f32": "f32"}.get(kind, "u32")
    value, members = vector(i.args[1], rows), scalar(i.args[2])
    if operation in ("min", "max"):
        if kind == "f32":
            function = {"min": np.minimum, "max": np.maximum} if i.has("NaN") else {"min": np.fmin, "max": np.fmax}
        else:
            function = {"min": np.minimum, "max": np.maximum}
        functions = {**functions, **function}
    elif kind == "f32":
        raise Unsupported("redux on f32 has min and max only")

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        want = members(warp, first_lane(mask))
        if not gather(warp, mask, want, i):
            return False
        active = np.array([lane for lane in lanes(mask) if want >> lane & 1])
        values = value(warp)[active]
        if i.has("abs"):
            values = np.abs(values)
        with np.errstate(over="ignore"):
            result = functions[operation].reduce(values, dtype=values.dtype)
        put(warp, i.args[0], np.full(32, result, values.dtype).view(np.uint32), mask)
        return True

    return run


@special("elect", kind=WAIT)
def elect(kernel: Kernel, i: Instruction) -> Callable:
    """elect.sync d|p, members: the lowest member is the leader (the ISA leaves open which)."""
    target = i.args[0]
    if not isinstance(target, Pair):
        raise Unsupported("elect.sync needs d|p")
    members = scalar(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        want = members(warp, first_lane(mask))
        if not gather(warp, mask, want, i):
            return False
        able = want & warp.bits(mask)
        leader = (able & -able).bit_length() - 1
        put(warp, target.first, np.full(32, leader, np.uint32), mask)
        put(warp, target.second, leader == _LANES, mask)
        return True

    return run


@special("activemask")
def activemask(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        put(warp, i.args[0], np.full(32, warp.bits(mask), np.uint32), mask)

    return run
