"""Reference of `vsa::untile_blocks`: one row per block, given to every token of the block."""

from __future__ import annotations

from torch import Tensor


def untile_blocks(rows: Tensor, token_slot: Tensor, block_size: int) -> Tensor:
    """``[B, H, N, D]`` -> ``[B, S, H, D]``."""
    return rows.transpose(1, 2).index_select(1, token_slot // block_size)
