"""Reference of block-sparse attention, any device: the meaning of `vsa::attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import LOG2_E, accumulation_dtype, as_blocks, iterate_rows


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    kv_block_sizes: Tensor,
    sm_scale: float,
    block_size: int,
    out: Tensor,
    lse_log2: Tensor,
) -> None:
    """Fills ``out [B, H_q, S_q, D]`` and, unless it is empty, ``lse_log2 [B, H_q, S_q]``, both contiguous.

    A row without a key gives out = 0 and lse_log2 = -inf.
    """
    wide = accumulation_dtype(q.dtype)
    q_blocks, k_blocks, v_blocks = (as_blocks(x, block_size) for x in (q, k, v))
    out_blocks = out.view(-1, block_size, q.shape[3])
    if kv_block_sizes.shape[0] == 0 or kv_indices.shape[3] == 0:
        out.zero_()
        lse_log2.fill_(-torch.inf)
        return
    for rows in iterate_rows(kv_indices, kv_num_blocks, kv_block_sizes, k.shape[1], block_size, q.shape[3]):
        scores = q_blocks[rows.span].to(wide) @ rows.gather(k_blocks, wide).transpose(1, 2)
        scores = (scores * (sm_scale * LOG2_E)).masked_fill(~rows.key_valid[:, None], -torch.inf)
        # exp2(-inf - 0) is 0; exp2(-inf + inf) would be NaN.
        peak = scores.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -torch.inf, 0)
        weights = torch.exp2(scores - peak)
        total = weights.sum(-1, keepdim=True)
        values = (weights @ rows.gather(v_blocks, wide)) / total.masked_fill(total == 0, 1)
        out_blocks[rows.span] = values.to(out.dtype)
        if lse_log2.numel():
            lse_log2.view(-1, block_size)[rows.span] = (peak + torch.log2(total)).squeeze(-1).to(lse_log2.dtype)
