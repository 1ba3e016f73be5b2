"""The prologue benchmark without a GPU: every form computes a rotation, and the command runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench_prologue import FORMS, NORMS, PROVIDERS, Case, Prologue, forget, plan
from benchmarks.harness import read_rows

ROOT = Path(__file__).resolve().parent.parent
TINY = {"head_dim": 32, "device": "cpu", "dtype": torch.float32}


def test_what_is_measured():
    cases = plan(("480p", "720p"), (12, 40))
    assert len(cases) == len(set(cases)) == 4 * (len(FORMS) * len(NORMS) + 2)
    assert {case.provider for case in cases} == set(PROVIDERS)
    assert cases[0].floor_bytes() == (3 * 32760 + 3 * 39936) * 12 * 128 * 2


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("form", FORMS)
def test_rotations_keep_lengths(form, norm):
    """The unrotated q has the same squares of every pair, so rows have the same length."""
    prologue = Prologue(Case("eager", form, norm, "tiny", 2, **TINY))
    tiles, layout = prologue.run(), prologue.case.layout()
    q = tiles[0][:, :, layout.token_slot.long()].transpose(1, 2)
    x = prologue._operands[0].unflatten(2, (2, -1))
    axes = (2, 3) if norm == "all" else (3,)
    normed = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + 1e-6)
    normed = normed * prologue._weights[0].view(-1, 32)
    torch.testing.assert_close(q.square().sum(-1), normed.square().sum(-1))
    torch.testing.assert_close(tiles[3], tiles[0].unflatten(2, (-1, 64)).sum(3))


@pytest.mark.parametrize("provider", PROVIDERS[:2])
def test_compiled_equals_eager(provider):
    expected, got = (Prologue(Case(p, "interleaved", "all", "tiny", 2, **TINY)).run() for p in ("eager", provider))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    forget("cpu")


def test_the_command_runs_on_a_machine_without_a_gpu(tmp_path):
    record = tmp_path / "record.csv"
    command = [sys.executable, "-m", "benchmarks.bench_prologue", "--device", "cpu", "--tiny", "--workers", "0"]
    command += ["--providers", "eager", "--output", str(record)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [row["metric"] for row in read_rows(record)] == ["time", "time_over_floor"]
