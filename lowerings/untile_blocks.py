"""Decomposition of `vsa::untile_blocks`; it has no lowering, because then min-cut would save its result.

The partitioner recomputes `aten.index` and not an operator it does not know: the backward keeps one row per block.
"""

from __future__ import annotations

import torch

from vsa_inductor.reference import untile_blocks


def decompose(rows: torch.Tensor, token_slot: torch.Tensor, slot_token: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[B, H, N, D]`` -> ``[B, S, H, D]``, as a gather of rows."""
    return untile_blocks(rows, token_slot, block_size)


OP = torch.ops.vsa.untile_blocks.default
