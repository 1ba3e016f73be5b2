"""The mutation score: of a small set of mutants now, and of the stored table; and that the proofs prove."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

from ..errors import Finding
from ..mutants import pipeline, plan, score
from ..mutants.drops import dropped_kind
from ..mutants.edit import Mutation, changing, dropping, moving
from ..mutants.history import History
from ..mutants.redundant import Prover
from ..mutants.subject import Subject

TRITON = "3.8"
REQUIRED = 0.95
FEWEST = 250


@pytest.fixture(scope="module")
def ring() -> Prover:
    """The tensor memory ring of pipeline.py."""
    return Prover(Subject(pipeline.case(), strict=True))


def _find(prover: Prover, text: str, which: int = 0) -> int:
    return [i.index for i in prover.subject.kernel.instructions if text in i.text][which]


def _verdict(prover: Prover, mutation: Mutation) -> tuple[str, str]:
    row = score.judge(prover.subject, prover, mutation)
    return row.verdict, row.note


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# The score ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("title", plan.QUICK_KERNELS)
def test_score_of_the_quick_set(title: str) -> None:
    if "/own/" not in title and not _triton().startswith(TRITON):
        pytest.skip(f"triton: {_triton()}; the corpus is compiled by triton {TRITON}")
    rows = score.score_kernel(plan.subject(title), 1, lambda kind: True)
    assert len({r.kind for r in rows}) == len(rows) >= 5
    assert [r for r in rows if r.verdict in (score.MISSED, "crash", "refused")] == []
    assert sum(r.verdict == score.REDUNDANT for r in rows) <= 0.4 * len(rows)


def test_stored_score() -> None:
    rows, sums = score.read_rows(), score.read_sums()
    assert sums == score.sums(rows)
    total = sums[-1]
    assert total.by == "all" and total.mutants >= FEWEST
    assert total.score >= REQUIRED
    assert {r.kernel for r in rows} == set(plan.KERNELS)


def test_stored_score_has_every_kind_that_the_quick_set_has() -> None:
    kinds = {s.name for s in score.read_sums() if s.by == "kind"}
    subject = Subject(pipeline.case(), strict=True)
    everything = set(range(len(subject.kernel.instructions)))
    assert set(plan.mutations(subject.kernel, everything)) <= kinds


# Known traps ----------------------------------------------------------------------------------------------------------
TRAPS = {
    "reads are not over when the stage goes back": ("tcgen05.wait::ld", 0, {"poison", "race"}),
    "products begin before the stage is free": ("%r11+24624], %r10", 0, {"race", "barrier"}),
    "the epilogue reads before the products are done": ("%r11+24608], %r9", 0, {"race", "uninitialised"}),
    "no fence before the stage goes back": ("fence::before", 1, {"tcgen05-fence"}),
    "no fence after the stage came": ("fence::after", 2, {"tcgen05-fence"}),
}


@pytest.mark.parametrize("name", TRAPS)
def test_tensor_memory_traps_are_found_in_one_run(ring: Prover, name: str) -> None:
    text, which, kinds = TRAPS[name]
    verdict, schedule = _verdict(
        ring, Mutation("drop", _find(ring, text, which), "", dropping(_find(ring, text, which)))
    )
    assert verdict in kinds and schedule == "earliest"


def test_a_stage_handed_back_before_its_reads_is_found(ring: Prover) -> None:
    load, arrive = _find(ring, "tcgen05.ld"), _find(ring, "mbarrier.arrive.shared.b64 _, [%r11+24624]")
    verdict, schedule = _verdict(ring, Mutation("early commit", load, "", moving(load, arrive)))
    assert verdict in ("poison", "race") and schedule == "earliest"


def test_a_thread_too_few_at_a_barrier_is_found(ring: Prover) -> None:
    """All results are right, and no access races in this schedule: the phases are what gives it away."""
    init = _find(ring, "128", 0)
    assert ring.subject.kernel.instructions[init].mods[0] == "init"
    assert _verdict(ring, Mutation("wrong barrier count", init, "", changing(init, (1,), -1))) == (
        "barrier",
        "earliest",
    )


# Edits ----------------------------------------------------------------------------------------------------------------
def test_unchanged_instructions_are_shared_and_indices_stay(ring: Prover) -> None:
    kernel = ring.subject.kernel
    wait = _find(ring, "mbarrier.try_wait")
    mutant = Mutation("", wait, "", dropping(wait)).apply(kernel)
    assert mutant.instructions[wait].op == "setp"
    assert all(a is b for a, b in zip(mutant.instructions, kernel.instructions, strict=True) if a.index != wait)


def test_an_instruction_put_in_shifts_jumps(ring: Prover) -> None:
    kernel = ring.subject.kernel
    mma = _find(ring, "tcgen05.mma")
    mutant = Mutation("", mma, "", changing(mma, (1,), 1)).apply(kernel)
    assert len(mutant.instructions) == len(kernel.instructions) + 1
    assert [i.index for i in mutant.instructions] == list(range(len(mutant.instructions)))
    assert mutant.instructions[mma].op == "add" and mutant.instructions[mma + 1].name == kernel.instructions[mma].name
    jumps = [
        (a, b) for a, b in zip(kernel.instructions, _without(mutant.instructions, mma), strict=True) if a.op == "bra"
    ]
    for old, new in jumps:
        target = old.args[0].target
        assert new.args[0].target == target + (target > mma)


def _without(items: list, place: int) -> list:
    return items[:place] + items[place + 1 :]


def test_a_changed_kernel_leaves_the_original_alone(ring: Prover) -> None:
    before = [dataclasses.replace(i) for i in ring.subject.kernel.instructions]
    for mutation in plan.chosen(ring.subject.kernel, ring.trace.executed, 1):
        mutation.apply(ring.subject.kernel)
    assert ring.subject.kernel.instructions == before
    assert ring.subject.run(ring.subject.kernel).verdict == ""


# Proofs ---------------------------------------------------------------------------------------------------------------
def test_no_proof_is_given_for_a_fault(ring: Prover) -> None:
    """Everything that the checker finds would not pass as redundant either."""
    kernel = ring.subject.kernel
    for i in kernel.instructions:
        if i.index not in ring.trace.executed or not dropped_kind(i):
            continue
        mutation = Mutation(dropped_kind(i), i.index, "", dropping(i.index))
        mutant = mutation.apply(kernel)
        if ring.subject.run(mutant).verdict:
            assert ring.proof(mutation, mutant) == "", i.where()


def test_the_exhaustive_check_finds_what_the_checker_finds(ring: Prover) -> None:
    kept: list[History] = []

    def prepare(launch) -> None:
        kept.append(History(launch.finding, launch.kernel.instructions))
        launch.order = kept[0]

    wait = _find(ring, "%r11+24624], %r10")
    mutant = Mutation("", wait, "", dropping(wait)).apply(ring.subject.kernel)
    with pytest.raises(Finding):
        ring.subject.launch(mutant, ring.subject.options(), prepare)
    quiet = dataclasses.replace(
        ring.subject.options(), severity=dict.fromkeys(("race", "barrier", "tcgen05-fence"), "ignore")
    )
    kept.clear()
    ring.subject.launch(mutant, quiet, prepare)
    pairs = {(p.before, p.now) for p in kept[0].unordered if p.missing == "order"}
    lines = {
        name: ring.subject.kernel.instructions[_find(ring, text)].line
        for name, text in (("ld", "tcgen05.ld"), ("mma", "tcgen05.mma"))
    }
    assert (lines["ld"], lines["mma"]) in pairs
    kept.clear()
    ring.subject.launch(ring.subject.kernel, ring.subject.options(), prepare)
    assert kept[0].unordered == set()
