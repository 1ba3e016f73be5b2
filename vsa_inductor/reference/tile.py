"""Reference of `vsa::tile`: raster order to tile order, empty slots zero."""

from __future__ import annotations

import torch
from torch import Tensor


def tile(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> Tensor:
    """``[B, S, H, D]`` -> contiguous ``[B, H, S_pad, D]``. Reads only ``slot_token``; ``token_slot`` is its inverse."""
    tiled = x.transpose(1, 2).index_select(2, slot_token.clamp(min=0).long())
    # Not in place: decompositions trace it.
    return tiled.masked_fill((slot_token < 0)[:, None], 0).contiguous()


def tile_by_scatter(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> Tensor:
    """The same by scattering tokens into a zeroed buffer: what compilers fuse with the producer of ``x``."""
    B, _, H, D = x.shape
    tiled = torch.zeros(B, H, slot_token.shape[0], D, dtype=x.dtype, device=x.device)
    return torch.ops.aten.index_put(tiled, [None, None, token_slot.long()], x.transpose(1, 2))
