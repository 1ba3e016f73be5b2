"""Lowering of `vsa::tile_sums`: what the kernel that wrote the tiles has summed already, else a generated reduction."""

from __future__ import annotations

from typing import Any

import torch

from vsa_inductor.ops._allocate import statistics_dtype

from . import _inductor_compat as compat


def lower(x: Any, block_size: int) -> Any:
    """``[B, H, S_pad, D]`` -> ``[B, H, N, D]`` in the statistics dtype."""
    known_size, sums = compat.notes().get(compat.current_node().args[0], (0, None))
    if known_size == block_size:
        return sums
    B, H, S_pad, D = x.get_size()
    blocks = compat.aten(torch.ops.aten.view.default, x, [B, H, S_pad // block_size, block_size, D])
    accumulate = statistics_dtype(x.get_dtype())
    # One sum: split in two steps, its generated code was slower still on an H200 (benchmarks/data, commit 8be66a5).
    return compat.aten(torch.ops.aten.sum.dim_IntList, blocks, [3], dtype=accumulate)


OP = torch.ops.vsa.tile_sums.default
