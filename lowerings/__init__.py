"""Inductor lowerings of the `vsa` operators; installed as `vsa_inductor.lowerings`. One file per operator.

Three tiers, the best that this torch allows: the lowering, a decomposition that Inductor traces instead of the
operator, and the operator as an opaque call. `tiers()` says which one is in force; `use_tier` changes it for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vsa_inductor.backends.identity import lowering_hash
from vsa_inductor.reference import tile_by_scatter

from . import _inductor_compat as compat
from . import attention, attention_backward, tile, untile, untile_blocks

TIERS = ("lowering", "decomposition", "opaque")

_TABLE: dict[str, tuple[torch._ops.OpOverload, Callable[..., Any] | None, Callable[..., Any]]] = {
    "tile": (tile.OP, tile.lower, tile_by_scatter),
    "untile": (untile.OP, untile.lower, untile.decompose),
    "untile_blocks": (untile_blocks.OP, None, untile_blocks.decompose),
    "attention": (attention.OP, attention.lower, attention.decompose),
    "attention_backward": (attention_backward.OP, attention_backward.lower, attention_backward.decompose),
}
_tiers: dict[str, str] = {}
_reasons: dict[str, str] = {}


def tiers() -> dict[str, str]:
    """Operator -> the tier it is compiled by in this process."""
    return dict(_tiers)


def tier_reasons() -> dict[str, str]:
    """Operator -> why it is not compiled by its lowering, for those that are not."""
    return dict(_reasons)


def install(best: str = "lowering") -> None:
    """Registers every operator on ``best``, or on the best tier after it that this torch allows."""
    for name, (op, lower, decompose) in _TABLE.items():
        with contextlib.suppress(AttributeError, ImportError):
            compat.unregister(op)
        _reasons.pop(name, None)
        candidates: tuple[tuple[str, Callable[..., Any] | None, Callable[..., None]], ...] = (
            ("lowering", lower, compat.register),
            ("decomposition", decompose, compat.register_decomposition),
        )
        for tier, function, register in candidates:
            if function is None or TIERS.index(tier) < TIERS.index(best):
                continue
            try:
                register(op, function)
            except (AttributeError, ImportError, TypeError) as error:
                # A private name moved in this torch: the next tier needs fewer of them.
                _reasons[name] = f"{tier}: {error}"
                continue
            _tiers[name] = tier
            break
        else:
            _tiers[name] = "opaque"


@contextlib.contextmanager
def use_tier(tier: str) -> Iterator[None]:
    """Compiles with every operator on ``tier`` at best; for tests and for finding out what a lowering gains.

    Process-wide while it lasts, and not part of any cache key: use it with caches off.
    """
    install(tier)
    try:
        yield
    finally:
        install()


install()
# The second guard of cache identity, for operators without a backend argument. The first is that argument.
compat.append_cache_key_tag(f"vsa_inductor@{lowering_hash()}")
