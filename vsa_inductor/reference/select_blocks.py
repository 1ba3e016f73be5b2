"""Reference of `vsa::select_blocks`: the best k kv blocks of each row, the same on every backend."""

from __future__ import annotations

import torch
from torch import Tensor


def _ordered_keys(scores: Tensor) -> Tensor:
    """Integers that order like the scores: -0.0 equals 0.0, every NaN is the least of all."""
    wide, integer = (torch.float64, torch.int64) if scores.dtype == torch.float64 else (torch.float32, torch.int32)
    info = torch.iinfo(integer)
    # Adding +0.0 turns -0.0 into +0.0 and changes nothing else.
    bits = (scores.to(wide) + 0.0).view(integer)
    keys = torch.where(bits < 0, bits ^ info.max, bits)
    return torch.where(scores.isnan(), info.min, keys)


def select_blocks(scores: Tensor, k: int, num_forced: int = 0) -> tuple[Tensor, Tensor]:
    """``[B, H, N_q, N_kv]`` -> ``kv_indices [B, H, N_q, num_forced + k]`` ascending, ``kv_num_blocks [B, H, N_q]``."""
    keys = _ordered_keys(scores[..., num_forced:])
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = torch.sort(order, dim=-1).values + num_forced
    forced = torch.arange(num_forced, device=scores.device).expand(*chosen.shape[:-1], num_forced)
    kv_indices = torch.cat((forced, chosen), dim=-1).to(torch.int32)
    counts = torch.full(scores.shape[:-1], num_forced + k, dtype=torch.int32, device=scores.device)
    return kv_indices, counts
