"""benchmarks/run_on_blackwell.sh as far as it goes without a GPU: what it would run is there and takes its options."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import run_to_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "run_on_blackwell.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash: not on PATH")


def ran(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False, cwd="/", env=env
    )


@cache
def steps() -> dict[str, list[str]]:
    done = ran("--dry-run")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "send back: build/blackwell_report.tar.gz"
    matches = [re.fullmatch(r"step (\w+): (.*)", line) for line in lines]
    assert all(matches)
    # Printed for people: quotes are lost, so what has blanks in it is not looked at.
    return {match[1]: shlex.split(match[2].replace('"', "").replace("'", "")) for match in matches if match}


def test_its_steps():
    assert list(steps()) == [
        "commit", "changes", "device", "software", "build", "install", "resources", "report", "tests", "run_to_run",
        "run_to_run_waves", "sanitizer", "benchmark",
    ]  # fmt: skip
    assert "--architectures" in steps()["build"] and "90a;100a;103a" in steps()["build"]
    assert steps()["tests"][1:] == ["-m", "pytest", "-m", "gpu", "-n", "0", "tests",
                                    "--junitxml=build/blackwell_report/tests.xml"]  # fmt: skip
    assert "65536" in steps()["run_to_run"] and "262144" in steps()["run_to_run_waves"]


@cache
def help_of(*program: str) -> str:
    ran = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
    return ran.stdout


@pytest.mark.parametrize("name", ["build", "resources", "run_to_run", "run_to_run_waves", "sanitizer", "benchmark"])
def test_programs_take_their_options(name):
    program, *rest = steps()[name]
    assert program == sys.executable
    # `-m module` or a file.
    start = rest[:2] if rest[0] == "-m" else rest[:1]
    printed = help_of(program, *start)
    for option in (word for word in rest[len(start) :] if word.startswith("--")):
        assert option in printed, option
    if "--providers" in rest:
        first = rest.index("--providers") + 1
        for provider in rest[first : rest.index("--output")]:
            assert re.search(rf"\b{provider}\b", printed), provider


def test_bash_reads_it():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda: there is a device here")
def test_without_a_device_nothing_is_begun(tmp_path):
    done = ran("--out", str(tmp_path / "report"))
    assert done.returncode == 3 and "torch sees no CUDA device" in done.stderr
    assert not (tmp_path / "report").exists()


def test_options_it_does_not_know():
    done = ran("--fast")
    assert done.returncode == 2 and "unknown option --fast" in done.stderr
    assert ran("--out").returncode == 2
    assert "emulated and not yet run on silicon" in " ".join(ran("--help").stdout.split())


def test_what_compares_two_runs(capsys):
    """The program itself, at a size for a CPU."""
    first = run_to_run.results("eager", 256, 1, 2, "cpu")
    assert [tuple(x.shape) for x in first] == [(1, 1, 256, 128)] * 4
    assert run_to_run.compare("again", first, run_to_run.results("eager", 256, 1, 2, "cpu"), run_to_run.TWO_RUNS)
    assert capsys.readouterr().out.count("ok same bits") == 4
    broken = (*first[:2], first[2].clone(), first[3])
    broken[2][0, 0, 64:128] = 0
    assert not run_to_run.compare("again", broken, first, run_to_run.TWO_RUNS)
    assert "dk: max" in (printed := capsys.readouterr().out) and printed.count("TOO FAR") == 1
    nothing = tuple(torch.full_like(x, torch.nan) for x in first)
    assert not run_to_run.compare("again", nothing, first, run_to_run.TWO_RUNS)
