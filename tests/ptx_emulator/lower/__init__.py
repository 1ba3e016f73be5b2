"""PTX instructions into Python: straight-line runs become one generated function, the rest a closure each.

Two registries. `@generated("add", ...)` (registry.py) adds lines to the function of a straight-line run through `Code`
(code.py); `@special("mbarrier.init", ...)` builds a closure for what touches barriers, engines or control flow.
The longest registered dotted prefix of an instruction's name decides.
"""

from __future__ import annotations

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
_loaded = False


def load_all() -> None:
    """Imports every module that registers instructions, once."""
    global _loaded
    if _loaded:
        return
    root = __package__.rpartition(".")[0]
    for name in _MODULES:
        importlib.import_module(f"{root}.{name}")
    _loaded = True
