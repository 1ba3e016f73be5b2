"""Runs mutants and keeps the score: a row for each mutant, sums by kernel and by kind."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from .edit import Mutation
from .plan import chosen
from .redundant import Prover
from .subject import SCHEDULES, Outcome, Subject

FOLDER = Path(__file__).parent
ROWS_FILE, SUMS_FILE = FOLDER / "score.csv", FOLDER / "summary.csv"
TEXT_WIDTH = 72
MISSED, REDUNDANT = "missed", "redundant"


@dataclass(frozen=True)
class Row:
    """One mutant. `verdict`: how it was found (subject.Outcome), REDUNDANT or MISSED; `note`: schedule or proof."""

    kernel: str
    kind: str
    line: int
    instruction: str
    fault: str
    verdict: str
    note: str


@dataclass(frozen=True)
class Sum:
    by: str  # "kernel", "kind", "verdict", "all"
    name: str
    mutants: int
    found: int
    redundant: int
    missed: int

    @property
    def score(self) -> float:
        """Found, of those that are not redundant."""
        return self.found / (self.found + self.missed) if self.found + self.missed else 1.0


def judge(subject: Subject, prover: Prover, mutation: Mutation) -> Row:
    """Runs a mutant under each schedule until one finds it; what none finds needs a proof."""
    mutant = mutation.apply(subject.kernel)
    i = subject.kernel.instructions[mutation.index]
    outcome, note = Outcome(""), ""
    for schedule, seed in SCHEDULES:
        outcome = subject.run(mutant, schedule, seed)
        if outcome.verdict:
            note = schedule
            break
    verdict = outcome.verdict
    if not verdict:
        note = prover.proof(mutation, mutant)
        verdict = REDUNDANT if note else MISSED
    text = " ".join(i.text.split())
    text = text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 3] + "..."
    return Row(subject.title, mutation.kind, i.line, text, mutation.what, verdict, note)


def score_kernel(subject: Subject, limit: int | None, wanted: Callable[[str], bool]) -> list[Row]:
    """All chosen mutants of a kernel whose kind is wanted."""
    prover = Prover(subject)
    found = chosen(subject.kernel, prover.trace.executed, limit)
    return [judge(subject, prover, m) for m in found if wanted(m.kind)]


def sums(rows: Sequence[Row]) -> list[Sum]:
    """By kernel, by kind, and of all."""
    result = []
    for by, key in (("kernel", lambda r: r.kernel), ("kind", lambda r: r.kind), ("all", lambda r: "all")):
        for name in sorted({key(r) for r in rows}):
            verdicts = [r.verdict for r in rows if key(r) == name]
            redundant, missed = verdicts.count(REDUNDANT), verdicts.count(MISSED)
            result.append(Sum(by, name, len(verdicts), len(verdicts) - redundant - missed, redundant, missed))
    return result


def table(found: Iterable[Sum], by: str) -> str:
    lines = [f"{by:<56} mutants  found  redundant  missed   score"]
    lines += [
        f"{s.name:<56} {s.mutants:7d} {s.found:6d} {s.redundant:10d} {s.missed:7d} {s.score:7.1%}"
        for s in found
        if s.by == by
    ]
    return "\n".join(lines)


def verdicts(rows: Sequence[Row]) -> str:
    """How often each verdict came, and under which schedule."""
    counts: dict[tuple[str, str], int] = {}
    for r in rows:
        counts[(r.verdict, r.note)] = counts.get((r.verdict, r.note), 0) + 1
    return "\n".join(
        f"{n:6d}  {verdict} ({note})" for (verdict, note), n in sorted(counts.items(), key=lambda c: -c[1])
    )


def write(rows: Sequence[Row]) -> None:
    for path, kind, items in ((ROWS_FILE, Row, rows), (SUMS_FILE, Sum, sums(rows))):
        with path.open("w", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow([f.name for f in fields(kind)])
            out.writerows(astuple(item) for item in items)


def read_rows() -> list[Row]:
    with ROWS_FILE.open(newline="") as file:
        return [Row(**{**r, "line": int(r["line"])}) for r in csv.DictReader(file)]  # type: ignore[arg-type]


def read_sums() -> list[Sum]:
    with SUMS_FILE.open(newline="") as file:
        return [
            Sum(r["by"], r["name"], *(int(r[n]) for n in ("mutants", "found", "redundant", "missed")))
            for r in csv.DictReader(file)
        ]
