"""mbarrier phases that depend on the schedule are found in one run, whichever phase this run happens to see."""

from __future__ import annotations

import pytest

from .. import Device, Options, load
from ..errors import BarrierError, LateArrivalError
from .ptx_text import kernel, wait

INIT = """
mov.u32 %r1, smem;
add.u32 %r2, %r1, 8;
shr.u32 %r3, %r60, 3;
add.u32 %r3, %r3, %r1;
setp.eq.u32 %p0, %r60, 0;
setp.eq.u32 %p1, %r60, 32;
setp.eq.u32 %p2, %r60, 64;
@%p0 mbarrier.init.shared.b64 [%r1], 1;
@%p0 mbarrier.init.shared.b64 [%r2], 1;
bar.sync 0;
"""
# A thread without accesses has nothing to tell: each writes its own word before it arrives.
WRITE = "st.shared.u32 [%r3+16], %r60;\n"
ARRIVE = WRITE + "mbarrier.arrive.shared.b64 _, [%r1];\n"
ANSWER = WRITE + "mbarrier.arrive.shared.b64 _, [%r2];\n"
SCHEDULES = [{"schedule": "earliest"}, {"schedule": "latest"}, {"strict": True}]


def run(*parts: str, **options: object) -> None:
    """Thread 0 of warp k does parts[k]."""
    body = INIT
    for k, part in enumerate(parts):
        body += f"@!%p{k} bra not{k};\n{part}bra end;\nnot{k}:\n"
    text = kernel("n:u32", body + "end: bar.warp.sync -1;\n", shared=32)
    Device().launch(load(text), block=96, args=[0], options=Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", SCHEDULES)
def test_arrivals_of_two_phases_in_unknown_order(options: dict) -> None:
    """One arrival a phase: the second thread may come first. Waiting for the first's phase makes it right."""
    run(ARRIVE, wait("%r1", 0) + ARRIVE, **options)
    with pytest.raises(BarrierError, match="does not know the phase before to be complete: it may count for that one"):
        run(ARRIVE, ARRIVE, **options)


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_wait_that_skips_a_phase(options: dict) -> None:
    """Parity 1 is that of the phase before the first as well: who skips phase 0 may go through at once."""
    twice = ARRIVE + wait("%r1", 0) + ARRIVE
    with pytest.raises(BarrierError, match="waits and does not know the phase before to be complete"):
        run(twice, wait("%r1", 1), **options)


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_phase_that_completes_before_a_wait_for_the_last(options: dict) -> None:
    """A waiter that does not answer may wait for a parity that came and went. Here another thread answers."""
    arrives_twice, answers = ARRIVE + wait("%r2", 0) + ARRIVE, wait("%r1", 0) + ANSWER
    run("", arrives_twice, answers, **options)
    with pytest.raises(BarrierError, match="nothing orders that after a wait for this one"):
        run(wait("%r1", 0), arrives_twice, answers, **options)


@pytest.mark.parametrize("options", SCHEDULES)
def test_an_invalidation_that_a_wait_may_miss(options: dict) -> None:
    """Another thread may still ask a barrier that is invalidated under it."""
    invalidate = "mbarrier.inval.shared.b64 [%r1];\n"
    severity = {"late-arrival": "error"}
    run(wait("%r1", 0) + ANSWER, ARRIVE + wait("%r2", 0) + invalidate, severity=severity, **options)
    with pytest.raises(LateArrivalError, match="nothing orders that after a wait for it"):
        run(wait("%r1", 0), ARRIVE + wait("%r2", 0) + invalidate, wait("%r1", 0) + ANSWER, severity=severity, **options)


@pytest.mark.parametrize("options", SCHEDULES)
def test_an_arrival_that_counts_itself_in_too_late(options: dict) -> None:
    """cp.async.mbarrier.arrive without .noinc adds to what is pending: the phase may be over before it does."""
    joins = WRITE + "cp.async.mbarrier.arrive.shared.b64 [%r1];\n"
    run(joins + ANSWER, wait("%r2", 0) + ARRIVE + wait("%r1", 0), **options)
    with pytest.raises(BarrierError, match="nothing orders that before the others"):
        run(joins, ARRIVE + wait("%r1", 0), **options)
