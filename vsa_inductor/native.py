"""The one loader of native libraries. It keeps the reason why a library could not be loaded, and shows it."""

from __future__ import annotations

import mmap
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import NativeLibraryError

# Schemas, contracts and what stands between them: csrc/build_info.cpp.in holds the number a library was built for.
INTERFACE = 2
# Written by the build where there is no library: why.
REASON_FILE = "_native_build.txt"
# The sentence that every library of ours carries as data, so that it can be read without loading it.
_MARK = re.compile(rb"vsa_native interface=(\d+) architectures=([\w,]+) cuda=([\d.]+) sources=(\w+)")


@dataclass(frozen=True)
class NativeStatus:
    """Whether a native library implements operators in this process.

    Attributes:
        path: the library, or None where none was found.
        loaded: whether it is loaded.
        reason: one sentence: what was loaded, or why nothing was.
    """

    path: str | None
    loaded: bool
    reason: str


_status = NativeStatus(None, False, "this installation was built without a native library")


def status() -> NativeStatus:
    """The state of the native library of this process."""
    return _status


def implements(op: torch._ops.OpOverload) -> bool:
    """Whether a loaded library implements ``op`` on CUDA devices."""
    return op.has_kernel_for_dispatch_key(torch._ops.DispatchKey.CUDA)


def load_library(path: str | os.PathLike[str]) -> None:
    """Loads a native library built separately; its operators are used from the next call on.

    Code that is compiled already keeps the backend it was compiled for.

    Args:
        path: the shared library.

    Raises:
        NativeLibraryError: there is no such file, it was built for another version of this package, or the loader
            refused it. What was loaded before stays in use.
    """
    global _status
    file = Path(path)
    if not file.is_file():
        raise NativeLibraryError(f"path: got {str(file)!r}, which is not a file; allowed: a built native library")
    built_for = _described(file)
    try:
        torch.ops.load_library(str(file.resolve()))
    except OSError as error:
        # torch says only that it failed; the reason of the dynamic loader is the cause.
        raise NativeLibraryError(f"path: {str(file)!r} could not be loaded: {error.__cause__ or error}") from error
    from .backends import capability

    capability.library_changed()
    _status = NativeStatus(str(file), True, f"loaded from {file}{built_for}")


def _described(file: Path) -> str:
    """What a library of ours was built for, in words; nothing for one that does not say."""
    if file.stat().st_size == 0:
        return ""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        mark = _MARK.search(content)
        if mark is None:
            return ""
        interface, architectures, cuda, sources = (group.decode() for group in mark.groups())
    if int(interface) != INTERFACE:
        raise NativeLibraryError(
            f"path: got {str(file)!r}, built for interface {interface}; allowed: interface {INTERFACE}, that of this "
            "version of vsa_inductor"
        )
    names = ", ".join(f"sm_{name}" for name in architectures.split(","))
    return f" ({names}; CUDA {cuda}; sources {sources})"


def load_packaged(folder: Path | None = None) -> None:
    """Loads the library that was built into the package, if there is one; warns once if it is broken."""
    global _status
    folder = folder or Path(__file__).parent
    libraries = sorted(folder.glob("_native*.so"))
    if not libraries:
        reason = folder / REASON_FILE
        if reason.is_file():
            sentence = "this installation was built without a native library: "
            _status = NativeStatus(None, False, sentence + reason.read_text().strip())
        return
    try:
        load_library(libraries[0])
    except NativeLibraryError as error:
        _status = NativeStatus(str(libraries[0]), False, str(error))
        warnings.warn(f"vsa_inductor works without its native library: {error}", stacklevel=2)
