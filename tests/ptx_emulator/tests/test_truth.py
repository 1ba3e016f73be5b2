"""Kernels that ran on an H200: the same bits here, whatever the schedule and the order of the blocks."""

from __future__ import annotations

import re

import pytest

from .. import Options
from ..truth.case import FOLDER, Case
from ..truth.cases import cases
from ..truth.replay import check, replay

CASES = cases()
NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_gpu_agrees_with_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_emulator_agrees_with_gpu(case: Case) -> None:
    report = replay(case, Options())
    assert report is None or not report.findings


@pytest.mark.parametrize(
    ("schedule", "order"), [("latest", "reversed"), ("random", "shuffled")], ids=["latest-reversed", "random-shuffled"]
)
@pytest.mark.parametrize("case", CASES[::3], ids=NAMES[::3])
def test_other_schedules_and_orders(case: Case, schedule: str, order: str) -> None:
    replay(case, Options(schedule=schedule, order=order, seed=5))


def test_every_kernel_is_a_case() -> None:
    kernels = {
        (path.stem, name)
        for path in (FOLDER / "ptx").glob("*.ptx")
        for name in re.findall(r"\.entry (\w+)\(", path.read_text())
    }
    assert kernels == {(case.module, case.kernel) for case in CASES}


def test_every_source_is_compiled() -> None:
    sources = {path.stem for path in (FOLDER / "kernels").glob("*.cu")}
    assert sources == {path.stem for path in (FOLDER / "ptx").glob("*.ptx")}


def test_no_data_without_a_case_and_none_large() -> None:
    files = {path: path.stat().st_size for path in (FOLDER / "data").iterdir()}
    assert set(files) == {case.data for case in CASES}
    assert max(files.values()) <= 100_000 and sum(files.values()) <= 1_200_000


def test_ptx_names_no_folder() -> None:
    for path in (FOLDER / "ptx").glob("*.ptx"):
        assert not re.search(r'"[^"\n]*/[^"\n]*"', path.read_text()), path.name
