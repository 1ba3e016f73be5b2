"""Does it depend on the schedule which phase of an mbarrier an arrival or a wait belongs to?

One run stands for all schedules only if it does not. These rules keep it so; each is checked with what threads know:

1. who arrives knows that the phase before is complete (else the arrival may count for that one);
2. who waits for a phase knows that the phase before it is complete (else it may see the parity of an earlier one);
3. a phase completes after all that waited for the phase before have seen it (else they miss it, and wait for ever);
4. an arrival that counts itself in (cp.async.mbarrier.arrive without .noinc) does so before the last of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import BarrierError, LateArrivalError
from ..shadow import EMPTY, Token

if TYPE_CHECKING:
    from ..ir import Instruction
    from ..warp import Warp
    from .mbarrier import Barrier


_SEEN = "phases.seen"  # key in Warp.state: what those knew whose arrivals its waits saw


def seen_by(warp: Warp, lanes: int) -> Token:
    """What has happened before an arrival by these lanes: more than a release carries, since a tcgen05.commit tells
    those who wait for it about tensor memory only."""
    return EMPTY if warp.actor is None else warp.actor.release(lanes) | warp.state.get(_SEEN, EMPTY)


def learn_seen(warp: Warp, told: Token) -> None:
    """The warp has met those that arrived with `seen_by`."""
    warp.state[_SEEN] = warp.state.get(_SEEN, EMPTY) | told


class PhaseWatch:
    """Of one mbarrier."""

    __slots__ = ("earlier", "joined", "others", "seen", "told", "waits")

    def __init__(self) -> None:
        self.earlier = EMPTY  # what the completion of the phase before the last one carried
        self.seen = EMPTY  # what those that arrived in the running phase knew
        self.told = EMPTY  # the same of the last phase
        self.waits: dict[int, Instruction] = {}  # events: waits that saw the last completion
        self.joined: dict[int, Instruction] = {}  # events: arrivals that counted themselves in (no .noinc)
        self.others = EMPTY  # what those knew that arrived without

    def arrive(self, barrier: Barrier, seen: Token, instruction: Instruction | None, joins: bool) -> None:
        """`seen`: what the arriving thread knew, or the thread that issued what arrives. `joins`: it was counted in."""
        if barrier.completed.known & ~seen.known:
            _report(
                barrier,
                "an arrival by a thread that does not know the phase before to be complete: it may count for that one",
                instruction,
            )
        self.seen |= seen
        if not joins:
            self.others |= seen

    def wait(self, barrier: Barrier, warp: Warp, lanes: int, instruction: Instruction) -> None:
        """A wait of these lanes that found the last phase complete; before they learn what that carries."""
        actor = warp.actor
        assert actor is not None
        unknown = self.earlier.known & ~actor.known
        if unknown and unknown & ~actor.release(lanes).known:
            _report(
                barrier,
                f"{warp.label} waits and does not know the phase before to be complete: it may see an earlier one",
                instruction,
            )
        self.waits[actor.event(lanes)] = instruction
        learn_seen(warp, self.told)

    def complete(self, barrier: Barrier) -> None:
        """Before the barrier goes on to its next phase."""
        for events, seen, what in (
            (self.waits, self.seen, "the next phase completes, and nothing orders that after a wait for this one: "
             "it may be missed"),
            (self.joined, self.others, "an arrival counts itself in, and nothing orders that before the others: "
             "the phase may complete without it"),
        ):  # fmt: skip
            for event, instruction in events.items():
                if not _knows(seen, event):
                    _report(barrier, what, instruction)
            events.clear()
        self.earlier, self.told, self.seen, self.others = barrier.completed, self.seen, EMPTY, EMPTY

    def end(self, barrier: Barrier, warp: Warp, lane: int, instruction: Instruction) -> None:
        """mbarrier.inval by this lane: who waited for the last phase must have seen it."""
        known = seen_by(warp, 1 << lane)
        for event, wait in self.waits.items():
            if not _knows(known, event):
                barrier.cta.report(
                    LateArrivalError,
                    f"mbarrier at {barrier.offset:#x} is invalidated, and nothing orders that after a wait for it\n"
                    f"  now:    {instruction.where()}\n  before: {wait.where()}",
                )
                return


def _knows(token: Token, event: int) -> bool:
    """Of one of the threads that took part in it at least."""
    return bool(token.known >> event & 1) or event in token.parts


def _report(barrier: Barrier, what: str, instruction: Instruction | None) -> None:
    where = f"\n  {instruction.where()}" if instruction is not None else ""
    barrier.cta.report(BarrierError, f"mbarrier at {barrier.offset:#x}, phase {barrier.phase}: {what}{where}")
