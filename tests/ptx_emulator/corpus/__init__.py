"""Kernels of independent compilers (Triton, Gluon) with their inputs and the numbers they must produce.

    python -m tests.ptx_emulator corpus [--small] [--target sm_100a] [NAME ...]     runs cases and prints a table

`cases` needs Triton 3.8 to be installed, `run` compiles what is not in the cache (compile.py) and needs no GPU.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .. import Device, Options, load
from .case import Case, Expected, Program

if TYPE_CHECKING:
    from .. import Report

__all__ = ["Case", "Expected", "Program", "cases", "run"]


def cases(target: str | None = None, small_only: bool = False) -> list[Case]:
    """All cases, those for one target ("sm_90a", "sm_100a", "sm_120a", "sm_121a"), or those that CI runs."""
    from . import gluon_blackwell, gluon_hopper, triton_attention, triton_matmul, triton_rows

    found: list[Case] = []
    for module in (triton_matmul, triton_attention, triton_rows, gluon_blackwell, gluon_hopper):
        found += module.cases()
    return [case for case in found if target in (None, case.target) and (case.small or not small_only)]


def run(case: Case, options: Options | None = None, seed: int = 0) -> Report:
    """Compiles, launches and compares.

    Raises AssertionError with the numbers when a result is off, and whatever finding the emulator has that the case
    does not name as known.
    """
    options = options or Options()
    known = dict.fromkeys(case.known, "lint")
    options = dataclasses.replace(options, severity={**known, **options.severity})
    program = case.make()
    device = Device()
    arguments, expected = program.build(device, np.random.default_rng(seed))
    report = program.launch(device, load(program.ptx), arguments, options)
    for result in expected:
        result.check()
    return report
