"""Builds the no-op CUDA device (noop_device.cpp) and loads it before torch. Imports the standard library only."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("noop_device.cpp")


class PreloadError(RuntimeError):
    """The no-op device could not be built or came too late; the message says which."""


def torch_root() -> Path:
    """The installed torch package's folder, found without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PreloadError("torch is not installed")
    return Path(spec.origin).parent


def cache_directory() -> Path:
    """A folder of this user's own below the temporary directory: what is loaded from it is executed."""
    directory = Path(tempfile.gettempdir()) / f"vsa_inductor_fake_gpu_{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PreloadError(f"{directory} belongs to another user; set TMPDIR to a folder of your own")
    return directory


def build() -> Path:
    """Compiles the shared library once per torch version, source text and compiler; returns its path."""
    compiler = os.environ.get("CXX", "g++")
    root = torch_root()
    identity = (SOURCE.read_text(), importlib.metadata.version("torch"), str(root), compiler)
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    library = cache_directory() / f"noop_device_{key}.so"
    if library.exists():
        return library
    # Built beside the final name and moved: two test sessions may build at once.
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        command = [
            compiler,
            "-O1",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{root / 'include'}",
            str(SOURCE),
            "-o",
            str(built),
        ]
        command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise PreloadError(f"no C++ compiler: {compiler} not found (CXX names another)") from error
        if result.returncode:
            raise PreloadError(f"{compiler} failed on {SOURCE.name}:\n{result.stderr}")
        os.replace(built, library)
    return library


def load() -> None:
    """Registers the no-op device in this process.

    Raises PreloadError when torch was imported before: it caches the CUDA hooks at the first question, for good.
    """
    if "torch" in sys.modules:
        raise PreloadError("the no-op device must be loaded before torch is imported")
    library = build()
    lib = torch_root() / "lib"
    # torch/__init__.py loads the same files later; global visibility lets ours resolve its symbols now.
    for path in (lib / "libtorch_global_deps.so", lib / "libc10.so", lib / "libtorch_cpu.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
