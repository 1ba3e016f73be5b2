"""Kernels of independent compilers: right numbers and no race, whatever the schedule and the order of the blocks."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from .. import Options
from ..errors import KINDS, EmulatorError

# The corpus is written in the Gluon of this version; others lack names that it uses.
TRITON = "3.8"


def _why_not() -> str:
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed; the corpus is compiled by triton {TRITON}"
    found = importlib.metadata.version("triton")
    return "" if found.startswith(TRITON) else f"triton {found} is installed; the corpus is written for {TRITON}"


# Triton emits no tcgen05.fence, starts warp specialisation with equal writes, invalidates before the last commit.
NOTED = ("tcgen05-fence", "same-value", "late-arrival", "leftover")
REASON = _why_not()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

from ..corpus import Case, cases, command, run  # noqa: E402

SMALL = cases(small_only=True)
NAMES = [f"{case.target}/{case.name}" for case in SMALL]


@pytest.mark.parametrize("case", SMALL, ids=NAMES)
def test_numbers_and_no_race(case: Case) -> None:
    # A finding raises; what is noted only must be of the kinds that correct code of these compilers has.
    report = run(case, Options())
    assert report.instructions > 0
    assert {lint.kind for lint in report.lints} <= {*NOTED, *case.known}


@pytest.mark.parametrize(
    ("schedule", "order"), [("latest", "reversed"), ("random", "shuffled")], ids=["latest-reversed", "random-shuffled"]
)
@pytest.mark.parametrize("case", SMALL[::3], ids=NAMES[::3])
def test_other_schedules_and_orders(case: Case, schedule: str, order: str) -> None:
    run(case, Options(schedule=schedule, order=order, seed=11), seed=11)


def test_every_target_and_family_is_there() -> None:
    targets = {case.target for case in cases()}
    assert {"sm_90a", "sm_100a", "sm_121a"} <= targets
    assert len({(case.target, case.name) for case in cases()}) == len(cases())
    for family in ("matmul", "matmul_ws", "attention", "attention_ws", "attention_backward"):
        assert any(case.target == "sm_100a" and case.name.split("/")[1].startswith(family) for case in cases()), family


def test_kinds_of_findings_have_names_of_their_own() -> None:
    assert len(set(KINDS)) == len(KINDS)


def test_a_name_that_no_case_has() -> None:
    with pytest.raises(EmulatorError, match="no-such-case"):
        command.main(["no-such-case"])
