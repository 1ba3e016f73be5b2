"""Lowering of `vsa::tile_sums_backward`: the block's row read for every slot, fused into what adds or reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._sympy.functions import FloorDiv

from . import _inductor_compat as compat


def lower(dsums: Any, block_size: int, dtype: torch.dtype) -> Any:
    """``[B, H, N, D]`` -> ``[B, H, N * block_size, D]``."""
    rows = compat.contiguous(dsums)
    # For an un-tile that adds the rows in its own pass.
    compat.notes()[compat.current_node()] = (block_size, rows)
    B, H, N, D = rows.get_size()
    load = rows.make_loader()
    spread = compat.pointwise(
        (B, H, N * block_size, D), rows, lambda index: load([*index[:2], FloorDiv(index[2], block_size), index[3]])
    )
    return compat.convert(spread, dtype)


OP = torch.ops.vsa.tile_sums_backward.default
