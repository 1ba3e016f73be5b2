"""A short hash of the sources that decide what an operator computes, for cache keys.

Inductor's caches do not know about lowerings and custom kernels: without this, replaced code comes back from the cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def lowering_hash() -> str:
    """Eight hex digits of the sources of ops, backends, references (decompositions trace some) and lowerings."""
    # Found, not imported: lowerings import backends.
    lowerings = importlib.util.find_spec(f"{__package__.rpartition('.')[0]}.lowerings")
    rooms = [_PACKAGE / "ops", _PACKAGE / "backends", _PACKAGE / "reference"]
    if lowerings is not None and lowerings.origin is not None:
        rooms.append(Path(lowerings.origin).resolve().parent)
    return _hash(tuple(rooms))


@functools.cache
def backend_identity(name: str, room: str) -> str:
    """``name@hash`` over the shared sources and the backend's own kernels in ``room``."""
    return f"{name}@{hashlib.sha256((lowering_hash() + _hash((_PACKAGE / room,))).encode()).hexdigest()[:8]}"


def _hash(folders: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]
