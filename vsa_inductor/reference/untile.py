"""Reference of `vsa::untile`: tile order to raster order."""

from __future__ import annotations

from torch import Tensor


def untile(x: Tensor, token_slot: Tensor, slot_token: Tensor) -> Tensor:
    """``[B, H, S_pad, D]`` -> contiguous ``[B, S, H, D]``. Reads only ``token_slot``; ``slot_token`` is its inverse."""
    return x.transpose(1, 2).index_select(1, token_slot.long()).contiguous()
