"""A kernel of the corpus that faults are put into: built once, run many times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import KINDS, EmulatorError, Finding
from ..launch import DEFAULT_SEVERITY, Device, Launch, Module, Options, Report
from ..parse import parse
from ..schedule import run_grid

if TYPE_CHECKING:
    from ..corpus.case import Case, Expected
    from ..ir import Kernel

# A mutant may run this many times as long as the kernel itself before it counts as endless.
PATIENCE = 3
# Schedules that a mutant is run under, until one finds it. The first alone finds all races.
SCHEDULES = (("earliest", 0), ("latest", 0), ("random", 1), ("random", 2))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`verdict`: kind of the finding, "result", "crash" (an exception that is no finding), or "" for nothing."""

    verdict: str
    detail: str = ""


class Subject:
    """`strict`: a kernel that follows our own rules (launch.Options)."""

    def __init__(self, case: Case, strict: bool = False) -> None:
        self.strict = strict
        self.title = f"{case.target}/{case.name}"
        self.program = case.make()
        self.parsed = parse(self.program.ptx)
        self.kernel = self.parsed.kernels[self.program.kernel]
        self.severity: dict[str, str] = {}
        self.limit = 20_000_000
        self._baseline()

    def _baseline(self) -> None:
        """Runs the kernel as it is. Lints that it has itself stay lints; of the other kinds each counts as an error."""
        every = Options(strict=self.strict, severity=dict.fromkeys(KINDS, "error"), collect=True)
        report, _ = self.launch(self.kernel, every)
        found = {f.kind for f in report.findings}
        if not found <= DEFAULT_SEVERITY.keys():
            raise EmulatorError(f"{self.title} is not clean: {report.findings[0]}")
        self.severity = {k: "lint" if k in found else "error" for k in DEFAULT_SEVERITY}
        self.limit = PATIENCE * report.instructions + 20_000
        outcome = self.run(self.kernel)
        if outcome.verdict:
            raise EmulatorError(f"{self.title} itself has a finding: {outcome.verdict}: {outcome.detail}")

    def options(self, schedule: str = "earliest", seed: int = 0) -> Options:
        return Options(
            strict=self.strict, schedule=schedule, seed=seed, severity=self.severity, max_instructions=self.limit
        )

    def launch(
        self, kernel: Kernel, options: Options, prepare: Callable[[Launch], None] | None = None
    ) -> tuple[Report, list[Expected]]:
        """One run on fresh inputs. `prepare` sees the launch before it starts."""
        p = self.program
        device = Device(32 << 20)
        arguments, expected = p.build(device, np.random.default_rng(0))
        module = Module(dataclasses.replace(self.parsed, kernels={kernel.name: kernel}))
        launch = Launch(device, module, kernel.name, p.grid, p.block, p.cluster, p.shared, arguments, options)
        if prepare is not None:
            prepare(launch)
        # Wrong operands make wrong numbers; numpy need not warn of them.
        with np.errstate(all="ignore"):
            run_grid(launch)
        return launch.close(), expected

    def run(self, kernel: Kernel, schedule: str = "earliest", seed: int = 0) -> Outcome:
        """What is found in one run."""
        try:
            _, expected = self.launch(kernel, self.options(schedule, seed))
            with np.errstate(all="ignore"):
                for result in expected:
                    result.check()
        except Finding as found:
            return Outcome(found.kind, _first_lines(found))
        except AssertionError as wrong:
            return Outcome("result", _first_lines(wrong))
        except EmulatorError as refused:
            return Outcome("refused", _first_lines(refused))
        except Exception as error:
            return Outcome("crash", f"{type(error).__name__}: {_first_lines(error)}")
        return Outcome("")


def _first_lines(error: Exception) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines()[:4])[:400]
