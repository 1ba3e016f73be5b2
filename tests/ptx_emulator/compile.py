"""CUDA source to PTX with nvcc, kept by content so that a test session compiles each source once."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import LoadError


def cache_folder() -> Path:
    """Where generated PTX is kept: $PTX_EMULATOR_CACHE, else a folder of this user's in the temporary directory."""
    root = os.environ.get("PTX_EMULATOR_CACHE")
    path = Path(root) if root else Path(tempfile.gettempdir()) / f"ptx_emulator_cache_{os.getuid()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def nvcc() -> str | None:
    """Path of nvcc: $CUDA_HOME, then PATH; None where there is none."""
    home = os.environ.get("CUDA_HOME")
    inside = Path(home) / "bin" / "nvcc" if home else None
    return str(inside) if inside is not None and inside.exists() else shutil.which("nvcc")


@functools.lru_cache(maxsize=1)
def nvcc_version() -> str:
    """The release line of `nvcc --version`; part of every cache key."""
    found = nvcc()
    if found is None:
        raise LoadError("nvcc: not found in $CUDA_HOME/bin nor on PATH")
    return (
        subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    )


def compile_cuda(source: str, arch: str = "sm_90a", options: tuple[str, ...] = ("-lineinfo",)) -> str:
    """PTX of CUDA C++ text for one architecture. Raises `LoadError` with the compiler's words."""
    key = hashlib.sha256("\0".join((nvcc_version(), arch, *options, source)).encode()).hexdigest()[:24]
    target = cache_folder() / f"{key}.ptx"
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            cu = Path(folder) / "kernel.cu"
            cu.write_text(source)
            out = Path(folder) / "kernel.ptx"
            command = [str(nvcc()), "-ptx", f"-arch={arch}", "-std=c++17", *options, str(cu), "-o", str(out)]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise LoadError(f"nvcc failed for {arch}:\n{ran.stderr[-4000:]}")
            # A second process may write the same file: rename is atomic.
            partial = target.with_suffix(f".{os.getpid()}")
            partial.write_text(out.read_text().replace(f"{folder}/", ""))
            partial.replace(target)
    return target.read_text()
