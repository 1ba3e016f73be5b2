"""Reference of `vsa::transpose_blocks`: from kv blocks per q block to q blocks per kv block."""

from __future__ import annotations

import torch
from torch import Tensor


def transpose_blocks(kv_indices: Tensor, kv_num_blocks: Tensor, num_kv_blocks: int) -> tuple[Tensor, Tensor]:
    """``[B, H, N_q, M]`` -> ``q_indices [B, H, N_q * M]`` with a tail of -1, ``q_offsets [B, H, N_kv + 1]``."""
    B, H, N_q, M = kv_indices.shape
    places = torch.arange(M, device=kv_indices.device)
    ids = torch.where(places < kv_num_blocks[..., None], kv_indices, num_kv_blocks).reshape(B, H, N_q * M)
    ordered, order = torch.sort(ids, dim=-1, stable=True)
    q_indices = torch.where(ordered < num_kv_blocks, order // max(M, 1), -1).to(torch.int32)
    bounds = torch.arange(num_kv_blocks + 1, dtype=ids.dtype, device=ids.device)
    q_offsets = torch.searchsorted(ordered, bounds.expand(B, H, -1).contiguous(), out_int32=True)
    return q_indices, q_offsets
