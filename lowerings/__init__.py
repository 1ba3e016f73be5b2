"""Inductor lowerings of the `vsa` operators; installed as `vsa_inductor.lowerings`. One file per operator.

Three tiers, the best that this torch allows: the lowering, a decomposition that Inductor traces instead of the
operator, and the operator as an opaque call. `tiers()` says which one is in force; `use_tier` changes it for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vsa_inductor.backends.identity import switch
from vsa_inductor.errors import ArgumentError
from vsa_inductor.reference import gated_combine as combine_in_torch
from vsa_inductor.reference import gated_combine_backward as combine_backward_in_torch
from vsa_inductor.reference import tile_by_scatter
from vsa_inductor.reference import tile_sums as tile_sums_in_torch
from vsa_inductor.reference import tile_sums_backward as spread_rows_in_torch

from . import _inductor_compat_registration as registration
from . import (
    attention,
    attention_backward,
    gated_combine,
    gated_combine_backward,
    tile,
    tile_sums,
    tile_sums_backward,
    untile,
)

TIERS = ("lowering", "decomposition", "opaque")

_TABLE: dict[str, tuple[torch._ops.OpOverload, Callable[..., Any], Callable[..., Any]]] = {
    "tile": (tile.OP, tile.lower, tile_by_scatter),
    "tile_sums": (tile_sums.OP, tile_sums.lower, tile_sums_in_torch),
    "tile_sums_backward": (tile_sums_backward.OP, tile_sums_backward.lower, spread_rows_in_torch),
    "untile": (untile.OP, untile.lower, untile.decompose),
    "gated_combine": (gated_combine.OP, gated_combine.lower, combine_in_torch),
    "gated_combine_backward": (gated_combine_backward.OP, gated_combine_backward.lower, combine_backward_in_torch),
    "attention": (attention.OP, attention.lower, attention.decompose),
    "attention_backward": (attention_backward.OP, attention_backward.lower, attention_backward.decompose),
}
_tiers: dict[str, str] = {}
_reasons: dict[str, str] = {}


def tiers() -> dict[str, str]:
    """Operator -> the tier it is compiled by in this process."""
    return dict(_tiers)


def tier_reasons() -> dict[str, str]:
    """Operator -> why it is not compiled by a better tier, for those whose registration failed."""
    return dict(_reasons)


def install(best: str = "lowering") -> None:
    """Registers every operator on ``best``, or on the best tier after it that this torch allows.

    Raises:
        ArgumentError: ``best`` is none of :data:`TIERS`.
    """
    if best not in TIERS:
        raise ArgumentError("tier", repr(best), f"one of {TIERS}")
    for name, (op, lower, decompose) in _TABLE.items():
        registration.unregister(op)
        _reasons.pop(name, None)
        _tiers[name] = "opaque"
        for tier, function, register in (
            ("lowering", lower, registration.register),
            ("decomposition", decompose, registration.register_decomposition),
        ):
            if TIERS.index(tier) < TIERS.index(best):
                continue
            try:
                register(op, function)
            except (AttributeError, ImportError, TypeError) as error:
                # A private name moved in this torch: the next tier needs fewer of them.
                _reasons[name] = "; ".join(filter(None, (_reasons.get(name), f"{tier}: {error}")))
                continue
            _tiers[name] = tier
            break
    switch("tier", _summary())


def _summary() -> str | None:
    """The tiers in a word for cache keys; None where all are the best."""
    used = set(_tiers.values())
    if len(used) == 1:
        (tier,) = used
        return None if tier == TIERS[0] else tier
    return ",".join(f"{name}:{tier}" for name, tier in _tiers.items() if tier != TIERS[0])


@contextlib.contextmanager
def use_tier(tier: str) -> Iterator[None]:
    """Compiles with every operator on ``tier`` at best; for tests and for finding out what a lowering gains.

    Process-wide while it lasts. It is part of every cache key, and what `video_sparse_attention` or
    `block_sparse_attention` stands in is compiled again; a function that calls only other operators of
    ``torch.ops.vsa`` keeps the code it has.

    Raises:
        ArgumentError: ``tier`` is none of :data:`TIERS`.
    """
    install(tier)
    try:
        yield
    finally:
        install()


install()
