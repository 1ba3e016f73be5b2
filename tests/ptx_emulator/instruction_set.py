"""The modules that give instructions a meaning; importing one registers its instructions (registry.py)."""

from __future__ import annotations

import functools
import importlib

_MODULES = (
    "lower.arithmetic",
    "lower.floating",
    "lower.bits",
    "lower.convert",
    "lower.packed",
    "lower.move",
    "lower.memory_access",
    "lower.atomics",
    "engines.barriers",
    "engines.mbarrier",
    "engines.warp_ops",
    "engines.cluster",
    "engines.cp_async",
    "engines.bulk",
    "engines.tma",
    "engines.wgmma",
    "engines.mma_sync",
    "engines.matrix",
    "engines.tcgen05_mma",
    "engines.tcgen05_memory",
    "engines.tcgen05_sync",
    "engines.launch_control",
)


@functools.cache
def load_all() -> None:
    """Imports every module that registers instructions, once."""
    for name in _MODULES:
        importlib.import_module(f"{__package__}.{name}")
