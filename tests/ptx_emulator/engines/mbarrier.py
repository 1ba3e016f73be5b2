"""mbarrier objects: phases, pending arrivals, announced bytes, lifetimes. PTX ISA 9.7.13.15.

The 64 bits in shared memory stay opaque: the object is kept beside them, and any other access to those bytes while it
lives is a finding. A phase carries the tokens of its arrivals; who sees it complete knows what they knew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import AlignmentError, BarrierError, LateArrivalError, TransactionError
from ..hb import BARRIER, EMPTY, INDEX_BITS, Token
from ..ir import Instruction, Kernel, Mem, Reg, Sink
from ..operands import Scalar, lanes, scalar, vector
from ..registry import WAIT, Unsupported, special
from .phases import PhaseWatch, seen_by

if TYPE_CHECKING:
    from ..cta import Cta
    from ..warp import Warp

MAX_COUNT = (1 << 20) - 1
BYTES = 8


class Barrier:
    """One mbarrier object."""

    def __init__(self, cta: Cta, offset: int, count: int, instruction: Instruction) -> None:
        self.cta = cta
        self.offset = offset
        self.count = count
        self.pending = count
        self.transactions = 0
        self.phase = 0
        self.token = EMPTY  # of the running phase
        self.completed = EMPTY  # of the phase before
        self.instruction = instruction
        self.created: Token = EMPTY  # what the initialising thread released
        self.watch = PhaseWatch() if cta.order is not None else None

    def arrive(
        self,
        count: int,
        token: Token,
        instruction: Instruction | None = None,
        seen: Token | None = None,
        joins: bool = False,
    ) -> None:
        """`count` arrivals. More than are pending is a finding. `seen`: what the thread knew, where not `token`.

        `joins`: they were added to those pending before (cp.async.mbarrier.arrive without .noinc).
        """
        if count > self.pending:
            self.cta.report(
                BarrierError,
                f"mbarrier at {self.offset:#x}: {count} arrival(s) where {self.pending} of {self.count} are pending"
                f"{_of(instruction)}",
            )
            return
        if self.watch is not None:
            self.watch.arrive(self, token if seen is None else seen, instruction, joins)
        self.token |= token
        self.pending -= count
        self._complete()

    def expect(self, size: int, instruction: Instruction | None = None) -> None:
        self.transactions += size
        self._range(instruction)

    def complete_transactions(self, size: int, token: Token, instruction: Instruction | None = None) -> None:
        if self.watch is not None:
            self.watch.seen |= token
        self.token |= token
        self.transactions -= size
        self._range(instruction)
        self._complete()

    def _range(self, instruction: Instruction | None) -> None:
        if not -MAX_COUNT <= self.transactions <= MAX_COUNT:
            self.cta.report(
                TransactionError,
                f"mbarrier at {self.offset:#x}: {self.transactions} pending bytes, at most {MAX_COUNT}"
                f"{_of(instruction)}",
            )

    def _complete(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            if self.watch is not None:
                self.watch.complete(self)
            self.phase += 1
            self.pending = self.count
            self.completed, self.token = self.token, EMPTY
            self.cta.launch.report.phases += 1

    def state(self) -> int:
        """The opaque token of arrive: phase parity above, pending arrivals below (own encoding)."""
        return (self.phase & 1) << 63 | (self.phase & 0x7FFFFFFF) << 24 | self.pending


def _of(instruction: Instruction | None) -> str:
    return f"\n  {instruction.where()}" if instruction is not None else ""


def find(cta: Cta, offset: int, instruction: Instruction, warp: Warp | None = None) -> Barrier | None:
    """The live object there. None after a finding was reported (where that does not raise)."""
    barrier = cta.barriers.get(offset)
    if barrier is None:
        gone = offset in cta.state.get("invalidated", ())
        cta.report(
            LateArrivalError if gone and warp is None else BarrierError,
            f"mbarrier at {offset:#x} is {'invalidated' if gone else 'not initialised'}"
            f"{f', {warp.label} uses it' if warp else ', an asynchronous arrival came for it'}{_of(instruction)}",
        )
        return None
    if warp is not None and warp.actor is not None and barrier.created is not EMPTY:
        _ordered(warp, barrier, instruction)
    return barrier


def _ordered(warp: Warp, barrier: Barrier, instruction: Instruction) -> None:
    """The initialisation must have happened before anybody uses the object."""
    actor = warp.actor
    assert actor is not None
    event = barrier.created.known.bit_length() - 1
    seen = barrier.cta.state.setdefault("barriers_seen", set())
    if (warp.label, barrier.offset, event) in seen:
        return
    knows = actor.known >> event & 1 or event in actor.unsynced
    if not knows and not any(t.known >> event & 1 for t in actor.extra.values()):
        barrier.cta.report(
            BarrierError,
            f"mbarrier at {barrier.offset:#x}: {warp.label} uses it, but nothing orders that after its initialisation\n"
            f"  now:    {instruction.where()}\n  before: {barrier.instruction.where()}\n"
            f"  missing: a barrier (bar.sync, barrier.cluster) between them",
        )
    seen.add((warp.label, barrier.offset, event))


def at(warp: Warp, address: int, instruction: Instruction, use: bool = True) -> Barrier | None:
    """The object at a shared or generic address, of this block or of another of the cluster."""
    cta, offset = warp.cta.resolve_shared(address, instruction)
    return find(cta, offset, instruction, warp if use else None)


@special("mbarrier.init")
def initialise(kernel: Kernel, i: Instruction) -> Callable:
    address, count = scalar(i.args[0]), scalar(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            cta, offset = warp.cta.resolve_shared(address(warp, lane), i)
            n = count(warp, lane)
            cta.check_shared(offset, BYTES, i)
            if offset % BYTES:
                cta.report(AlignmentError, f"mbarrier at {offset:#x} is no multiple of 8\n  {i.where()}")
            if not 1 <= n <= MAX_COUNT:
                cta.report(
                    BarrierError, f"mbarrier at {offset:#x}: count {n}, 1..{MAX_COUNT} are allowed\n  {i.where()}"
                )
            if offset in cta.barriers:
                cta.report(
                    BarrierError,
                    f"mbarrier at {offset:#x} is initialised while it lives\n  now:    {i.where()}\n"
                    f"  before: {cta.barriers[offset].instruction.where()}\n  missing: mbarrier.inval",
                )
            barrier = Barrier(cta, offset, n, i)
            _occupy(warp, lane, barrier, i)
            cta.barriers[offset] = barrier
            cta.state.setdefault("invalidated", set()).discard(offset)
            cta.launch.report.barriers += 1

    return run


def _occupy(warp: Warp, lane: int, barrier: Barrier, i: Instruction) -> None:
    """A generic write of the 8 bytes, which then belong to the object."""
    shadow = barrier.cta.shared.shadow
    if shadow is None or warp.actor is None or warp.cta.order is None:
        return
    index = np.arange(barrier.offset >> shadow.shift, barrier.offset + BYTES >> shadow.shift)
    warp.cta.order.generic(warp.actor, 1 << lane, shadow, index[None], np.array([[lane]]), True, i)
    token = warp.actor.release(1 << lane)
    event = warp.actor.event(1 << lane)
    barrier.created = Token(token.known | 1 << event, 0, 0)
    shadow.writer[index] = BARRIER << INDEX_BITS | i.index


@special("mbarrier.inval")
def invalidate(kernel: Kernel, i: Instruction) -> Callable:
    address = scalar(i.args[0])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            barrier = at(warp, address(warp, lane), i)
            if barrier is None:
                continue
            cta, offset = barrier.cta, barrier.offset
            if barrier.transactions:
                cta.report(
                    TransactionError,
                    f"mbarrier at {offset:#x} is invalidated with {barrier.transactions} announced bytes outstanding\n"
                    f"  {i.where()}",
                )
            _all_arrived(warp, lane, barrier, i)
            if barrier.watch is not None:
                barrier.watch.end(barrier, warp, lane, i)
            del cta.barriers[offset]
            cta.state.setdefault("invalidated", set()).add(offset)
            shadow = cta.shared.shadow
            if shadow is not None and warp.actor is not None:
                event = warp.actor.event(1 << lane)
                index = slice(offset >> shadow.shift, offset + BYTES >> shadow.shift)
                shadow.writer[index] = event << INDEX_BITS | i.index
                shadow.lane[index] = lane

    return run


def _all_arrived(warp: Warp, lane: int, barrier: Barrier, i: Instruction) -> None:
    """Who invalidates must have seen every arrival, or another schedule lets one come too late."""
    if warp.actor is None:
        return
    unseen = (barrier.completed | barrier.token).known & ~warp.actor.release(1 << lane).known
    if unseen:
        order = warp.cta.order
        assert order is not None
        barrier.cta.report(
            LateArrivalError,
            f"mbarrier at {barrier.offset:#x} is invalidated by {warp.label}, "
            f"which has not seen all that arrived there\n"
            f"  now:    {i.where()}\n  before: {order.owners[unseen.bit_length() - 1]}\n"
            f"  missing: a wait for the last phase",
        )


def _with_count(i: Instruction, arguments: tuple, position: int) -> Scalar:
    return scalar(arguments[position]) if len(arguments) > position else (lambda warp, lane: 1)


def _split(i: Instruction) -> tuple[object, tuple]:
    """(destination or None, the rest): arrive has a form without a result."""
    if isinstance(i.args[0], Mem):
        return None, i.args
    return i.args[0], i.args[1:]


@special("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(kernel: Kernel, i: Instruction) -> Callable:
    """arrive(.expect_tx)(.noComplete)(.release | .relaxed)(.cta | .cluster); arrive_drop lowers the count too."""
    destination, rest = _split(i)
    address = scalar(rest[0])
    expects, drops = i.has("expect_tx"), i.mods[0] == "arrive_drop"
    keeps = i.has("noComplete")
    size = scalar(rest[1]) if expects else None
    count = (lambda warp, lane: 1) if expects else _with_count(i, rest, 1)
    releases = not i.has("relaxed")

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        whole = warp.converged(mask)
        for lane in lanes(mask):
            barrier = at(warp, address(warp, lane), i)
            if barrier is None:
                continue
            if isinstance(destination, Reg):
                warp.u64[destination.index][lane] = barrier.state()
            if size is not None:
                barrier.expect(size(warp, lane), i)
            token, seen = EMPTY, seen_by(warp, 1 << lane)
            if warp.actor is not None and releases:
                # Where the whole warp arrives, each phase gets what all its lanes did.
                token = warp.actor.release(warp.live if whole else 1 << lane)
            n = count(warp, lane)
            if drops:
                barrier.count -= n
            if keeps and n >= barrier.pending:
                barrier.cta.report(BarrierError, f"arrive.noComplete would complete the phase\n  {i.where()}")
            barrier.arrive(n, token, i, seen)

    return run


@special("mbarrier.expect_tx")
def expect(kernel: Kernel, i: Instruction) -> Callable:
    address, size = scalar(i.args[0]), scalar(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            barrier = at(warp, address(warp, lane), i)
            if barrier is not None:
                barrier.expect(size(warp, lane), i)

    return run


@special("mbarrier.complete_tx")
def complete(kernel: Kernel, i: Instruction) -> Callable:
    address, size = scalar(i.args[0]), scalar(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            barrier = at(warp, address(warp, lane), i)
            if barrier is not None:
                barrier.complete_transactions(size(warp, lane), EMPTY, i)

    return run


@special("mbarrier.pending_count")
def pending_count(kernel: Kernel, i: Instruction) -> Callable:
    destination, state = i.args[0].index, scalar(i.args[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for lane in lanes(mask):
            warp.u32[destination][lane] = state(warp, lane) & 0xFFFFF

    return run


def _waiter(i: Instruction, blocks: bool) -> Callable:
    """test_wait, and try_wait, which stays until the phase is over (or, randomly scheduled, sometimes fails)."""
    destination = i.args[0]
    if not isinstance(destination, (Reg, Sink)):
        raise Unsupported(f"destination {destination!r}: one predicate is needed")
    wide = isinstance(i.args[2], Reg) and i.args[2].cls == "d"
    address, want = vector(i.args[1]), vector(i.args[2], "u64" if wide else "u32")
    parity, acquires = i.has("parity"), not i.has("relaxed")

    def asked_for(value: int) -> int:
        """Parity, or the phase in the state that arrive gave (its pending count differs from lane to lane)."""
        return value & 1 if parity else value >> 24 & 0x7FFFFFFF

    def over(barrier: Barrier, phase: int) -> bool:
        return (barrier.phase & 1) != phase if parity else barrier.phase != phase

    def run(warp: Warp, mask: np.ndarray | None) -> bool:
        # Lanes that ask the same are answered together: mostly all do.
        asked: dict[tuple[int, int], int] = {}
        places, values = address(warp), want(warp)
        if mask is not None:
            places, values = places[mask], values[mask]
        if (places == places[0]).all() and (values == values[0]).all():
            asked[int(places[0]), asked_for(int(values[0]))] = warp.bits(mask)
        else:
            for lane, at_place, value in zip(lanes(mask), places.tolist(), values.tolist(), strict=True):
                key = (at_place, asked_for(value))
                asked[key] = asked.get(key, 0) | 1 << lane
        objects = {key: at(warp, key[0], i) for key in asked}
        answers = {key: b is None or over(b, key[1]) for key, b in objects.items()}
        warp.polls += not blocks and not all(answers.values())
        if blocks and not any(answers.values()) and not _spurious(warp):
            (place, _), barrier = next(iter(objects.items()))
            assert barrier is not None
            warp.waiting = (
                f"mbarrier at {place:#x}: phase {barrier.phase} runs, {barrier.pending} of {barrier.count} arrivals "
                f"and {barrier.transactions} bytes pending"
            )
            return False
        for key, bits in asked.items():
            if isinstance(destination, Reg):
                row = warp.p[destination.index]
                if bits == 0xFFFFFFFF:
                    row[:] = answers[key]
                else:
                    row[lane_mask(bits)] = answers[key]
            barrier = objects[key]
            if answers[key] and barrier is not None and barrier.watch is not None:
                barrier.watch.wait(barrier, warp, bits, i)
            if answers[key] and not acquires and barrier is not None:
                # A relaxed wait orders through a fence after it (fence.acq_rel, tcgen05.fence::after_thread_sync).
                warp.state["taken"] = warp.state.get("taken", EMPTY) | barrier.completed
            elif answers[key] and barrier is not None:
                warp.learn(bits, barrier.completed, i)
        return True

    return run


def lane_mask(bits: int) -> np.ndarray:
    """bool [32] of an integer's low bits."""
    return np.unpackbits(np.frombuffer((bits & 0xFFFFFFFF).to_bytes(4, "little"), np.uint8), bitorder="little").astype(
        bool
    )


def _spurious(warp: Warp) -> bool:
    launch = warp.cta.launch
    return launch.options.schedule == "random" and launch.options.spurious and launch.rng.random() < 0.1


@special("mbarrier.try_wait", kind=WAIT)
def try_wait(kernel: Kernel, i: Instruction) -> Callable:
    return _waiter(i, True)


@special("mbarrier.test_wait", kind=WAIT)
def test_wait(kernel: Kernel, i: Instruction) -> Callable:
    return _waiter(i, False)
