"""What compiled code of our operators depends on, for cache keys: a hash of sources, and what is switched off.

Inductor's caches do not know about lowerings and custom kernels: without this, replaced code comes back from the cache.
Two guards, each enough for what holds an attention. The backend argument of the operator is in the graph, hence in
every key. The tag in ``torch.compiler.config.cache_key_tag`` is in every key too, also of a piece of a graph that holds
none of the operators with such an argument; anyone may assign to it, and tracing puts it back.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parents[1]
_TAG = re.compile(r"vsa_inductor@[^;\s]*")

# What differs from an import, such as "+tier=opaque". Traced code reads it, so that Dynamo guards it: compiled code is
# for the switches it was compiled under.
switches = ""
_switched: dict[str, str] = {}


@functools.cache
def lowering_hash() -> str:
    """Eight hex digits of the sources of ops, backends, references (decompositions trace some) and lowerings."""
    return _hash((_PACKAGE / "ops", _PACKAGE / "backends", _PACKAGE / "reference", *_lowerings()))


@functools.cache
def backend_identity(name: str, room: str) -> str:
    """``name@hash`` over the shared sources and the backend's own kernels in ``room``."""
    return f"{name}@{hashlib.sha256((lowering_hash() + _hash((_PACKAGE / room,))).encode()).hexdigest()[:8]}"


def switch(name: str, value: str | None) -> None:
    """Makes ``name=value`` part of every cache key from now on, process-wide; None: ``name`` is as imported again."""
    global switches
    _switched.pop(name, None)
    if value is not None:
        _switched[name] = value
    switches = "".join(f"+{name}={_switched[name]}" for name in sorted(_switched))
    keep_cache_key_tag()


@torch.compiler.assume_constant_result
def keep_cache_key_tag() -> None:
    """Sets our part of ``torch.compiler.config.cache_key_tag`` to what holds now; what others put there stays.

    Traced code calls it: Dynamo runs it as it is, at every compilation.
    """
    config = torch.compiler.config
    ours = f"vsa_inductor@{lowering_hash()}{switches}"
    # Anything may have been assigned.
    tag, found = _TAG.subn(ours, "" if config.cache_key_tag is None else str(config.cache_key_tag))
    if not found:
        tag = f"{tag};{ours}" if tag else ours
    if tag != config.cache_key_tag:
        config.cache_key_tag = tag


def _lowerings() -> tuple[Path, ...]:
    # Found, not imported: lowerings import backends. In a checkout they stand beside the package.
    spec = importlib.util.find_spec(f"{__package__.rpartition('.')[0]}.lowerings")
    return () if spec is None or spec.origin is None else (Path(spec.origin).resolve().parent,)


def _hash(folders: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]
