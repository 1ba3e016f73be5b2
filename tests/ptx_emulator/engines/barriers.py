"""bar / barrier (named barriers of a block), fences, nanosleep, trap. PTX ISA 9.7.13.1-4, 9.7.19."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .. import access
from ..errors import BarrierError, ConvergenceError, TrapError
from ..hb import EMPTY, Token
from ..ir import Instruction, Kernel, Reg
from ..operands import Scalar, first_lane, lanes, scalar
from ..registry import WAIT, Unsupported, special
from . import map_fences
from .warp_ops import by_members

if TYPE_CHECKING:
    from ..cta import Cta
    from ..warp import Warp

NAMED_BARRIERS = 16
Count = Callable[["Warp", int], "int | None"]


@dataclass
class Named:
    """One of the 16 barriers of a block."""

    expected: int = 0  # threads of the running phase, 0 = nobody has come
    everybody: bool = False  # no count was stated: all threads of the block that have not exited
    arrived: int = 0
    phase: int = 0
    token: Token = EMPTY
    completed: Token = EMPTY
    fenced: Token = EMPTY  # what fences of the arriving threads covered
    covered: Token = EMPTY  # the same of the finished phase
    first: Instruction | None = None
    votes: list[np.ndarray] = field(default_factory=list)
    result: tuple[int, bool, bool] = (0, True, False)  # popc, and, or of the finished phase

    def leave(self) -> None:
        """A warp has exited: a barrier of the whole block waits for the others alone."""
        if self.everybody and self.expected:
            self.expected -= 32
            if self.arrived == self.expected:
                _complete(self)


def _named(cta: Cta, number: int) -> Named:
    return cta.named.setdefault(number, Named())


def _enter(warp: Warp, mask: np.ndarray | None, i: Instruction, number: int, stated: int | None) -> Named | None:
    """Counts a warp in. A warp counts as 32 threads, whatever part of it executes (the barrier is per warp).

    `stated`: the thread count of the instruction; without one, all threads that have not exited take part.
    """
    cta = warp.cta
    count = cta.live * 32 if stated is None else stated
    if not 0 <= number < NAMED_BARRIERS:
        cta.report(BarrierError, f"barrier {number}: 0..{NAMED_BARRIERS - 1} are allowed\n  {i.where()}")
        return None
    if count % 32 or count <= 0:
        cta.report(BarrierError, f"barrier {number}: thread count {count} is no positive multiple of 32\n  {i.where()}")
        return None
    b = _named(cta, number)
    if b.expected == 0:
        b.expected, b.first, b.everybody = count, i, stated is None
    elif b.expected != count:
        assert b.first is not None
        cta.report(
            BarrierError,
            f"barrier {number}: thread counts disagree\n  now:    {count}: {i.where()}\n"
            f"  before: {b.expected}: {b.first.where()}",
        )
    b.arrived += 32
    if b.arrived > b.expected:
        cta.report(
            BarrierError, f"barrier {number}: {b.arrived} threads where {b.expected} are expected\n  {i.where()}"
        )
    if warp.actor is not None:
        if "taken" in warp.state and not cta.launch.options.strict:
            # What one thread took by a relaxed access, the block knows after a barrier: see _build_sync.
            warp.actor.acquire(warp.live, warp.state.pop("taken"))
        b.token |= warp.actor.release(warp.live if mask is None else warp.bits(mask))
        b.fenced |= warp.state.get("fenced", EMPTY)
    return b


def _complete(b: Named) -> None:
    b.phase += 1
    b.expected = b.arrived = 0
    b.completed, b.token = b.token, EMPTY
    b.covered, b.fenced = b.fenced, EMPTY
    if b.votes:
        joined = np.concatenate(b.votes)
        b.result = (int(joined.sum()), bool(joined.all()), bool(joined.any()))
        b.votes = []


def _aligned(i: Instruction) -> bool:
    return i.op == "bar" or i.has("aligned")


def _build_sync(i: Instruction, number: Scalar, count: Count, vote: Callable | None = None) -> Callable:
    """Arrive and wait; the state of a warp that stands here is (barrier, phase) in warp.state["bar"]."""
    aligned = _aligned(i)

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        standing = warp.state.get("bar")
        if standing is None:
            if not warp.converged(mask):
                if aligned and len(warp.fragments) > 1 and _may_converge(warp, i):
                    warp.waiting = "the other threads of the warp"
                    return False
                if aligned:
                    _report_partial(warp, i)
                elif len(warp.fragments) > 1:
                    return _scattered(warp, mask, i)
            lane = first_lane(mask)
            n = number(warp, lane)
            b = _enter(warp, mask, i, n, count(warp, lane))
            if b is None:
                return True
            if vote is not None:
                b.votes.append(vote(warp, mask))
            standing = warp.state["bar"] = (b, b.phase, n)
            if b.arrived == b.expected:
                _complete(b)
        b, phase, n = standing
        if b.phase == phase:
            warp.waiting = f"barrier {n}: {b.arrived} of {b.expected} threads are there"
            return False
        del warp.state["bar"]
        if warp.actor is not None:
            warp.learn(warp.live, b.completed, i)
            warp.actor.synchronise(warp.live)
            if b.covered is not EMPTY and not warp.cta.launch.options.strict:
                # Every thread fences, the block meets, one thread signals: by the letter the fence of that thread comes
                # too early, but code that runs everywhere does it.
                warp.state["fenced"] = warp.state.get("fenced", EMPTY) | b.covered
        return True

    return run


def _report_partial(warp: Warp, i: Instruction) -> None:
    warp.cta.report(ConvergenceError, f"{warp.label}: an aligned barrier executed by a part of the warp\n  {i.where()}")


def _may_converge(warp: Warp, i: Instruction) -> bool:
    """Others of the warp are on their way: they stand before this instruction in the text, or wait there."""
    return any(f.pc != i.index for f in warp.fragments)


def _scattered(warp: Warp, mask: np.ndarray | None, i: Instruction) -> bool:
    """barrier.sync without .aligned by a part of a warp: the parts gather first, then the warp arrives once."""
    gathered = warp.state.setdefault("bar_gathered", set())
    gathered.add((i.index, warp.bits(mask)))
    total = 0
    for index, part in gathered:
        if index == i.index:
            total |= part
    if total != warp.live:
        warp.waiting = "the other threads of the warp"
        return False
    gathered.clear()
    for f in warp.fragments:
        f.pc = i.index
    return False


def _operands(i: Instruction) -> tuple[Scalar, Count]:
    return scalar(i.args[0]), scalar(i.args[1]) if len(i.args) > 1 else (lambda warp, lane: None)


@special("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync", kind=WAIT)
def sync(kernel: Kernel, i: Instruction) -> Callable:
    return _build_sync(i, *_operands(i))


@special("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def arrive(kernel: Kernel, i: Instruction) -> Callable:
    number, count = _operands(i)
    aligned = _aligned(i)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if aligned and not warp.converged(mask):
            _report_partial(warp, i)
        lane = first_lane(mask)
        b = _enter(warp, mask, i, number(warp, lane), count(warp, lane))
        if b is not None and b.arrived == b.expected:
            _complete(b)

    return run


@special("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red", kind=WAIT)
def reduce(kernel: Kernel, i: Instruction) -> Callable:
    """popc.u32, and.pred, or.pred over the threads of the barrier."""
    destination, source = i.args[0], i.args[-1]
    if not isinstance(destination, Reg) or not isinstance(source, Reg):
        raise Unsupported("operands of a reducing barrier")
    number, count = _operands(Instruction(i.op, i.mods, None, i.args[1:-1], i.text, i.line, i.loc))

    def vote(warp: Warp, mask: np.ndarray | None) -> np.ndarray:
        row = warp.p[source.index] ^ source.negated
        return row[np.array(lanes(mask))]

    inner = _build_sync(i, number, count, vote)

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        standing = warp.state.get("bar")
        if not inner(warp, mask):
            return False
        b = standing[0] if standing else _named(warp.cta, number(warp, first_lane(mask)))
        popc, every, some = b.result
        active = np.array(lanes(mask))
        if i.has("popc"):
            warp.u32[destination.index][active] = popc
        else:
            warp.p[destination.index][active] = every if i.has("and") else some
        return True

    return run


@special("bar.warp.sync", kind=WAIT)
def warp_sync(kernel: Kernel, i: Instruction) -> Callable:
    """Threads of the member mask meet; each sees what the others did before."""
    members = by_members(i.args[0])

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        return all([meet(warp, part, want & warp.live) for want, part in members(warp, mask)])

    def meet(warp: Warp, mask: np.ndarray | None, want: int) -> bool:
        have = warp.bits(mask)
        if have & want != want:
            # The parts meet here in any order: each waits until fragments at this place cover the mask.
            there = have
            for f in warp.fragments:
                if f.pc == i.index and f.mask is not None:
                    there |= warp.bits(f.mask)
            if there & want != want and len(warp.fragments) > 1:
                warp.waiting = f"bar.warp.sync {want:#x}: only {there & want:#x} are there"
                return False
            if there & want != want:
                warp.cta.report(
                    ConvergenceError, f"{warp.label}: bar.warp.sync {want:#x} by threads {have:#x} only\n  {i.where()}"
                )
        if warp.actor is not None:
            warp.actor.synchronise(want)
        return True

    return run


@special("fence", "membar")
def fence(kernel: Kernel, i: Instruction) -> Callable:
    """fence.proxy.async, fence.mbarrier_init, fence.acq_rel / .sc at a scope; others order nothing that is tracked."""
    proxy = i.has("proxy")
    asynchronous = proxy and any(m.startswith("async") for m in i.mods)
    if proxy and not asynchronous and not i.has("tensormap::generic") and not i.has("alias"):
        raise Unsupported(f"proxy fence {i.name}")
    tensor_map = scalar(i.args[0]) if proxy and i.has("tensormap::generic") and i.has("acquire") else None

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if warp.actor is None:
            return
        if asynchronous:
            warp.actor.fence_proxy(warp.bits(mask))
        elif tensor_map is not None:
            map_fences.acquire(warp, mask, tensor_map(warp, first_lane(mask)))
        elif not proxy:
            access.fence(warp, mask)

    return run


@special("nanosleep", kind=WAIT)
def nanosleep(kernel: Kernel, i: Instruction) -> Callable:
    """Gives way once."""

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        if warp.state.pop("slept", None) == i.index:
            return True
        warp.state["slept"] = i.index
        warp.waiting = "nanosleep"
        return False

    return run


@special("trap", "brkpt")
def trap(kernel: Kernel, i: Instruction) -> Callable:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        warp.cta.report(TrapError, f"{warp.label} lanes {lanes(mask)} executed {i.op}\n  {i.where()}")

    return run


@special("call")
def call(kernel: Kernel, i: Instruction) -> Callable:
    """Calls into the device runtime: a failed assertion stops the run, printing does nothing, others are refused."""
    names = [getattr(a, "name", "") for a in i.args]
    if "__assertfail" in names:

        def failed(warp: Warp, mask: np.ndarray | None) -> None:
            warp.cta.report(TrapError, f"{warp.label} lanes {lanes(mask)}: a device assertion failed\n  {i.where()}")

        return failed
    if "vprintf" in names:
        return lambda warp, mask: None
    raise Unsupported(
        f"call of {[n for n in names if n]}: functions of the module, __assertfail and vprintf are supported"
    )
