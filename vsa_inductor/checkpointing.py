"""Selective activation checkpointing around sparse attention: recompute what is cheap, never the attention kernel.

A checkpointed region runs its whole forward again in the backward, attention included. With :func:`policy` what
attention and selection gave is kept (out, lse and the lists), and everything around them is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from .errors import ArgumentError

Policy = Callable[..., CheckpointPolicy]


def saved_operators() -> tuple[torch._ops.OpOverload, ...]:
    """The operators whose results :func:`policy` keeps: attention (out and lse) and the block selection (the lists).

    Overloads, not packets: selective checkpointing compares with what was dispatched. For a list of one's own, as
    ``create_selective_checkpoint_contexts`` also takes.
    """
    return torch.ops.vsa.attention.default, torch.ops.vsa.select_blocks.default


def policy(base: Policy | None = None) -> Policy:
    """A policy for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Each attention in the region keeps out ``[B, H, S_pad, D]``, lse ``[B, H, S_pad]`` and its lists; q, k and v in tile
    order are made again from the region's inputs. A kept selection also cannot turn out differently, by a rounding
    difference, from the one that the kept lse belongs to.

    Args:
        base: decides about every other operator, called as ``base(ctx, op, *args, **kwargs)``; without one they are
            all recomputed.

    Raises:
        ArgumentError: ``base`` is not callable.

    Returns:
        The policy: ``MUST_SAVE`` for :func:`saved_operators`, else what ``base`` says or ``PREFER_RECOMPUTE``.
    """
    if base is not None and not callable(base):
        raise ArgumentError("base", type(base).__name__, "a policy function: base(ctx, op, *args, **kwargs)")
    kept = saved_operators()

    def decide(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE if base is None else base(ctx, op, *args, **kwargs)

    return decide


def context_fn(base: Policy | None = None) -> Callable[[], Any]:
    """The ``context_fn`` of a region that keeps :func:`saved_operators`, in eager and under ``torch.compile``::

        checkpoint(block, x, use_reentrant=False, context_fn=vsa.checkpointing.context_fn())

    Args:
        base: as for :func:`policy`.
    """
    return functools.partial(create_selective_checkpoint_contexts, policy(base))
