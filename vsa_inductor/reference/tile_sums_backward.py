"""Reference of `vsa::tile_sums_backward`: every slot of a block gets the block's row."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_sums_backward(dsums: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """``[B, H, N, D]`` -> ``[B, H, N * block_size, D]`` in ``dtype``."""
    return dsums.to(dtype).unsqueeze(3).expand(-1, -1, -1, block_size, -1).flatten(2, 3)
