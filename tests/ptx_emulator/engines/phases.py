"""Does it depend on the schedule which phase of an mbarrier an arrival or a wait belongs to?

One run stands for all schedules only if it does not. Three rules keep it so; each is checked with what threads know:

1. who arrives knows that the phase before is complete (else the arrival may count for that one);
2. who waits for a phase knows that the phase before it is complete (else it may see the parity of an earlier one);
3. a phase completes after all that waited for the phase before have seen it (else they miss it, and wait for ever).
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

    __slots__ = ("earlier", "seen", "told", "waits")

    def __init__(self) -> None:
        self.earlier = EMPTY  # what the completion of the phase before the last one carried
        self.seen = EMPTY  # what those that arrived in the running phase knew
        self.told = EMPTY  # the same of the last phase
        self.waits: dict[int, Instruction] = {}  # events: waits that saw the last completion

    def arrive(self, barrier: Barrier, seen: Token, instruction: Instruction | None) -> None:
        """`seen`: what the arriving thread knew, or the thread that issued what arrives."""
        if barrier.completed.known & ~seen.known:
            _report(
                barrier,
                "an arrival by a thread that does not know the phase before to be complete: it may count for that one",
                instruction,
            )
        self.seen |= seen

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
        for event, instruction in self.waits.items():
            if not self.seen.known >> event & 1 and event not in self.seen.parts:
                _report(
                    barrier,
                    "the next phase completes, and nothing orders that after a wait for this one: it may be missed",
                    instruction,
                )
        self.waits.clear()
        self.earlier, self.told, self.seen = barrier.completed, self.seen, EMPTY

    def end(self, barrier: Barrier, warp: Warp, lane: int, instruction: Instruction) -> None:
        """mbarrier.inval by this lane: who waited for the last phase must have seen it."""
        known = seen_by(warp, 1 << lane)
        for event, wait in self.waits.items():
            if not known.known >> event & 1 and event not in known.parts:
                barrier.cta.report(
                    LateArrivalError,
                    f"mbarrier at {barrier.offset:#x} is invalidated, and nothing orders that after a wait for it\n"
                    f"  now:    {instruction.where()}\n  before: {wait.where()}",
                )
                return


def _report(barrier: Barrier, what: str, instruction: Instruction | None) -> None:
    where = f"\n  {instruction.where()}" if instruction is not None else ""
    barrier.cta.report(BarrierError, f"mbarrier at {barrier.offset:#x}, phase {barrier.phase}: {what}{where}")
