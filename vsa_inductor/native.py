"""The one loader of native libraries. It keeps the reason why a library could not be loaded, and shows it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import NativeLibraryError


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


def load_library(path: str | os.PathLike[str]) -> None:
    """Loads a native library built separately; its operators are used from the next call on.

    Args:
        path: the shared library.

    Raises:
        NativeLibraryError: there is no such file, or the loader refused it. What was loaded before stays in use.
    """
    global _status
    file = Path(path)
    if not file.is_file():
        raise NativeLibraryError(f"path: got {str(file)!r}, which is not a file; allowed: a built native library")
    try:
        torch.ops.load_library(str(file.resolve()))
    except OSError as error:
        # torch says only that it failed; the reason of the dynamic loader is the cause.
        raise NativeLibraryError(f"path: {str(file)!r} could not be loaded: {error.__cause__ or error}") from error
    _status = NativeStatus(str(file), True, f"loaded from {file}")


def load_packaged(folder: Path | None = None) -> None:
    """Loads the library that was built into the package, if there is one; warns once if it is broken."""
    global _status
    libraries = sorted((folder or Path(__file__).parent).glob("_native*.so"))
    if not libraries:
        return
    try:
        load_library(libraries[0])
    except NativeLibraryError as error:
        _status = NativeStatus(str(libraries[0]), False, str(error))
        warnings.warn(f"vsa_inductor works without its native library: {error}", stacklevel=2)
