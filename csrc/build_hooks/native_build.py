"""Builds the native library with CMake, or says in one sentence why it cannot be built here.

    python csrc/build_hooks/native_build.py [--out FOLDER] [--architectures 90a]

setup.py calls it for `pip install .`; tests and machines without pip call it directly. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of CMakeLists.txt, and what pyproject.toml asks of torch.
LEAST_CUDA = (12, 8)
LEAST_TORCH = (2, 11)
LEAST_CMAKE = (3, 24)
# "0" installs without the library where everything for it is there.
SWITCH = "VSA_NATIVE"


class ToolchainMissing(Exception):
    """Something is not there. The message is a sentence for users."""


@dataclass(frozen=True)
class Toolchain:
    """What a build needs.

    Attributes:
        nvcc, cmake: the programs.
        torch: the folder of the package torch.
    """

    nvcc: str
    cmake: str
    torch: Path


def find_nvcc() -> str:
    """nvcc of $CUDA_HOME or $CUDA_PATH, of PATH, or in /usr/local/cuda."""
    if os.environ.get(SWITCH) == "0":
        raise ToolchainMissing(f"the variable {SWITCH} was 0")
    if sys.platform != "linux":
        raise ToolchainMissing(f"this platform is {sys.platform}; supported: linux")
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = [path for home in homes if (path := Path(home) / "bin" / "nvcc").exists()]
    found += [Path(path) for path in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if path and Path(path).exists()]
    if not found:
        raise ToolchainMissing("nvcc was found neither in $CUDA_HOME/bin nor on PATH nor in /usr/local/cuda/bin")
    nvcc = str(found[0])
    release = re.search(r"release (\d+)\.(\d+)", _version_text(nvcc))
    if release is None:
        raise ToolchainMissing(f"{nvcc} does not run, or does not say its version")
    version = tuple(map(int, release.groups()))
    if version < LEAST_CUDA:
        raise ToolchainMissing(f"{nvcc} is CUDA {_dotted(version)}; supported: CUDA >= {_dotted(LEAST_CUDA)}")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise ToolchainMissing("no C++ compiler was found")
    return nvcc


def _version_text(program: str) -> str:
    """What it prints as its version; nothing if it does not run."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def find_cmake() -> str:
    """cmake of PATH, or of this Python's package cmake."""
    beside = Path(sysconfig.get_path("scripts")) / "cmake"
    for path in (shutil.which("cmake"), beside if beside.exists() else None):
        if path is None:
            continue
        release = re.search(r"version (\d+)\.(\d+)", _version_text(str(path)))
        if release and tuple(map(int, release.groups())) >= LEAST_CMAKE:
            return str(path)
    raise ToolchainMissing(f"cmake >= {_dotted(LEAST_CMAKE)} was not found")


def find_torch() -> Path:
    """Folder of torch: importable here, or installed where pip, which hides it from builds, is going to install."""
    for folders in (sys.path, [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]):
        for distribution in importlib.metadata.distributions(name="torch", path=list(folders)):
            folder = Path(str(distribution.locate_file("torch")))
            version = tuple(int(part) for part in re.findall(r"\d+", distribution.version)[:2])
            if version >= LEAST_TORCH and (folder / "include" / "torch" / "csrc" / "stable").is_dir():
                return folder
    raise ToolchainMissing(f"the headers of torch >= {_dotted(LEAST_TORCH)} were not found")


def find_toolchain() -> Toolchain:
    """Everything a build needs. Raises `ToolchainMissing` with the first thing that is not there."""
    return Toolchain(find_nvcc(), find_cmake(), find_torch())


def missing_requirements() -> list[str]:
    """Python packages that a build would need besides what is here; none where nvcc is missing anyway."""
    try:
        find_nvcc()
    except ToolchainMissing:
        return []
    wanted = []
    for find, requirement in (
        (find_cmake, f"cmake>={_dotted(LEAST_CMAKE)}"),
        (find_torch, f"torch>={_dotted(LEAST_TORCH)}"),
    ):
        try:
            find()
        except ToolchainMissing:
            wanted.append(requirement)
    return wanted


def source_files() -> list[Path]:
    """Everything the library is made of."""
    return [ROOT / "CMakeLists.txt", *sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in _SUFFIXES)]


_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".in")


def sources_digest() -> str:
    """Eight hex digits of the sources."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def build(
    out: Path | None = None, architectures: str | None = None, toolchain: Toolchain | None = None
) -> tuple[Path, str]:
    """Builds what changed since the last time; returns the library and what the build printed.

    Args:
        out: the build folder, ``build/native`` of the checkout by default. One build at a time: others wait.
        architectures: such as ``"90a"``; $VSA_ARCHITECTURES or the default of CMakeLists.txt if not given.

    Raises:
        ToolchainMissing: before anything is built.
        RuntimeError: it does not build; the message is what the compilers said.
    """
    toolchain = toolchain or find_toolchain()
    out = (out or ROOT / "build" / "native").resolve()
    architectures = architectures or os.environ.get("VSA_ARCHITECTURES")
    configure = [
        toolchain.cmake, "-S", str(ROOT), "-B", str(out), f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc}",
        f"-DVSA_TORCH={toolchain.torch}", f"-DVSA_SOURCES={sources_digest()}",
        f"-DVSA_ARCHITECTURES={architectures}" if architectures else "-UVSA_ARCHITECTURES",
        *(["-G", "Ninja"] if shutil.which("ninja") else []),
    ]  # fmt: skip
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
    with _locked(out):
        # A folder configured for another generator, compiler or checkout cannot be used again.
        stamp, made_by = out / "made_by.txt", f"{ROOT}\n{toolchain}\nninja {shutil.which('ninja')}\n"
        if not stamp.exists() or stamp.read_text() != made_by:
            shutil.rmtree(out)
            out.mkdir(parents=True)
            stamp.write_text(made_by)
        printed = _run(configure)
        printed += _run([toolchain.cmake, "--build", str(out), "--parallel", jobs])
    return out / "_native.so", printed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # not on every platform that installs the package

    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode:
        words = "\n".join(line for line in ran.stdout.splitlines() if "ptxas info" not in line)
        raise RuntimeError(
            f"the native library does not build (install without it: {SWITCH}=0 pip install .)\n"
            f"{' '.join(command)}\n{words}"
        )
    return ran.stdout


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the native library of vsa_inductor.")
    parser.add_argument("--out", type=Path, help="build folder (default: build/native)")
    parser.add_argument("--architectures", help="such as 90a, or 90a;100a (default: those of CMakeLists.txt)")
    arguments = parser.parse_args()
    try:
        library, _ = build(arguments.out, arguments.architectures)
    except ToolchainMissing as missing:
        print(f"the native library is not built: {missing}", file=sys.stderr)
        return 2  # NOT_BUILT of benchmarks/native_resources.py
    except RuntimeError as failure:
        print(failure, file=sys.stderr)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
