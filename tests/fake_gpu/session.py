"""Driver processes of one test session, and the reason where there can be none."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .device import CHECKED_TORCH
from .generated_code import GeneratedCode

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHES = (90, 100)
# Functions of wan_block.py. Without a word on it: gated, and the backward of the triton backend.
GENERIC = ("wan", "wan_eager_backward", "wan_one_kernel", "per_head_rotate_half")
RECOGNISED = (
    "wan_recognised",
    "rotate_half_recognised",
    "per_head_recognised",
    "complex_recognised",
    "swapped_recognised",
)
UNGATED = ("ungated", "ungated_recognised")
# The backward of these has the contract that leaves most to generated code; their prologue is recognised.
ASKED = ("wan_asked", "ungated_asked")
ALL = (*GENERIC, *RECOGNISED, *UNGATED, *ASKED)
BUILDERS = ("tests.fake_gpu.plain_block:plain_block", *(f"tests.fake_gpu.wan_block:{name}" for name in ALL))


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be generated on this machine, in a sentence; None when it can."""
    version = importlib.metadata.version("torch")
    if not version.startswith(CHECKED_TORCH + "."):
        return f"tests/fake_gpu patches private names as torch {CHECKED_TORCH} has them; this is torch {version}"
    if sys.platform != "linux":
        return f"tests/fake_gpu loads a shared library before torch; done for Linux, this is {sys.platform}"
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return "tests/fake_gpu gives the CPU build of torch a device; this build has its own"
    if importlib.util.find_spec("triton") is None:
        return "tests/fake_gpu compiles with Triton, which is not installed"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"tests/fake_gpu needs a C++ compiler; {compiler} was not found"
    return None


class Run:
    """One driver process: generates and compiles the code of `builders` for one architecture."""

    def __init__(self, builders: tuple[str, ...], arch: int, directory: Path) -> None:
        self.arch, self.directory = arch, directory
        self._log = directory / "log.txt"
        command = [sys.executable, "-m", "tests.fake_gpu.run", *builders, "--arch", str(arch), "--out", str(directory)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    def wait(self) -> None:
        self._process.wait()

    def code(self, builder: str) -> GeneratedCode:
        """The code of one builder, by its function's name."""
        return GeneratedCode.read(self._finished(builder))

    def compiled(self, builder: str) -> list[dict[str, Any]]:
        """One record per kernel and launch configuration: the fields of `kernels.CompiledKernel`."""
        return json.loads((self._finished(builder) / "kernels.json").read_text())

    def _finished(self, builder: str) -> Path:
        self.wait()
        directory = self.directory / builder
        # Written last: without it this builder failed, whatever the others did.
        if not (directory / "kernels.json").exists():
            pytest.fail(
                f"{builder} on sm_{self.arch} was not generated:\n{self._log.read_text()[-8000:]}", pytrace=False
            )
        return directory

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
