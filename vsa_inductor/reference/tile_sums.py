"""Reference of `vsa::tile_sums`: the sum over the slots of each block."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_sums(x: Tensor, block_size: int) -> Tensor:
    """``[B, H, S_pad, D]`` -> ``[B, H, N, D]`` fp32, fp64 for fp64."""
    return x.unflatten(2, (-1, block_size)).sum(3, dtype=torch.promote_types(x.dtype, torch.float32))
