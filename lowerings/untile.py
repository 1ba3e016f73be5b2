"""Lowering of `vsa::untile`: a gather, fused into what reads the tokens. Gradients of q, k and v that a norm and a
rotation follow take one kernel of ours (`lowerings/norm_rope_tile_backward.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from . import _inductor_compat as compat
from . import norm_rope_tile_backward


def lower(x: Any, token_slot: Any, slot_token: Any) -> Any:
    """``[B, H, S_pad, D]`` -> ``[B, S, H, D]``."""
    untiled = norm_rope_tile_backward.lower(x, slot_token)
    return gather(x, token_slot) if untiled is None else untiled


def gather(x: Any, token_slot: Any) -> Any:
    """One load per token."""
    B, H, S_pad, D = x.get_size()
    (S,) = token_slot.get_size()
    load, slot_of = x.make_loader(), compat.position(token_slot, S_pad, x)
    return compat.pointwise((B, S, H, D), x, lambda index: load([index[0], index[2], slot_of(index[1]), index[3]]))


def decompose(x: torch.Tensor, token_slot: torch.Tensor, slot_token: torch.Tensor) -> torch.Tensor:
    """The gather in ATen. Offsets are computed in the dtype of the index, which must hold them."""
    return x.transpose(1, 2).index_select(1, token_slot.long())


OP = torch.ops.vsa.untile.default
