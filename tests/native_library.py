"""The native library of this checkout for tests: built where it can be, else the installed one, else a skip and why.
And for tests on a GPU that has its kernels: problems on it, and the native operators called with them.

Processes of one test session share the build folder; whoever comes first builds, the others find nothing to do.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from problems import Problem, random_problem
from torch import Tensor

import vsa_inductor as vsa
from vsa_inductor import native
from vsa_inductor.backends import sm90

ROOT = Path(__file__).resolve().parents[1]
HOOKS = ROOT / "csrc" / "build_hooks"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == sm90.CAPABILITY
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="sm90: no device of compute capability 9.0 here"),
]
FORWARD, BACKWARD = torch.ops.vsa.attention_sm90, torch.ops.vsa.attention_backward_sm90


@functools.cache
def native_build() -> ModuleType:
    """csrc/build_hooks/native_build.py, which is not installed."""
    spec = importlib.util.spec_from_file_location("native_build", HOOKS / "native_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["native_build"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@functools.cache
def _built() -> tuple[Path | None, str]:
    try:
        return native_build().build()[0], ""
    except native_build().ToolchainMissing as missing:
        return None, str(missing)


def built_library() -> Path:
    """The library of the sources as they are. Skips without nvcc; a build that fails is a failure."""
    library, why = _built()
    if library is None:
        pytest.skip(f"native library: {why}")
    return library


def any_library() -> Path:
    """The installed library if these are its sources, else `built_library`, else the installed one."""
    installed = native.status()
    if installed.loaded and installed.path and f"sources {native_build().sources_digest()}" in installed.reason:
        return Path(installed.path)
    library, why = _built()
    path = installed.path if library is None else str(library)
    if path is None:
        pytest.skip(f"native library: {why}, and none is installed")
    return Path(path)


def load_any_library() -> None:
    """Loads `any_library` unless it is what is loaded."""
    path = any_library()
    if native.status().path != str(path):
        vsa.load_library(path)


def problem_of(case: dict[str, Any], head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Problem:
    return random_problem(**{"dtype": dtype, "device": "cuda", **case, "head_dim": head_dim, **more})


def native_forward(problem: Problem, return_lse: bool = True) -> tuple[Tensor, Tensor]:
    arguments = (*problem.operands, *problem.lists, problem.sm_scale, problem.block_size)
    return FORWARD(*arguments, return_lse, False)


def backward_arguments(
    problem: Problem,
    lse: Tensor,
    delta: Tensor,
    *,
    deterministic: bool = False,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Any, ...]:
    """Of the native backward, with the lists of transpose_blocks; ``needs`` are those of dq and of dk, dv."""
    transposed = torch.ops.vsa.transpose_blocks(*problem.lists[:2], problem.kv_block_sizes.shape[0])
    return (
        problem.dout, *problem.operands, lse, delta, *problem.lists[:2], *transposed, problem.kv_block_sizes,
        problem.sm_scale, problem.block_size, deterministic, *needs,
    )  # fmt: skip


def native_backward_arguments(problem: Problem, **more: Any) -> tuple[Any, ...]:
    """`backward_arguments` with the statistics of the native forward."""
    out, lse = native_forward(problem)
    return backward_arguments(problem, lse, (out.float() * problem.dout.float()).sum(-1), **more)


def run_python(code: str, *arguments: str, timeout: int = 300) -> str:
    """What a fresh process prints that runs ``code``; a failure shows all it said."""
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, check=False, env=env
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
