"""Reference of the gradients of block-sparse attention, any device: the meaning of `vsa::attention_backward`."""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import LOG2_E, accumulation_dtype, as_blocks, iterate_rows


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    kv_indices: Tensor,
    kv_num_blocks: Tensor,
    kv_block_sizes: Tensor,
    sm_scale: float,
    block_size: int,
    needs_dq: bool,
    needs_dkv: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq before its scale, dk and dv, all in the accumulation dtype and contiguous; None for what is not needed.

    dq ``[B, H_q, S_q, D]`` is the plain sum of dS @ K: the caller multiplies it by sm_scale.
    """
    wide = accumulation_dtype(q.dtype)
    B, H, S_q, D = q.shape
    q_blocks, k_blocks, v_blocks, dout_blocks = (as_blocks(x, block_size) for x in (q, k, v, dout))
    lse_rows, delta_rows = lse_log2.reshape(-1, block_size, 1), delta.reshape(-1, block_size, 1)
    dq = torch.zeros(q_blocks.shape, dtype=wide, device=q.device) if needs_dq else None
    dk = torch.zeros(k_blocks.shape, dtype=wide, device=q.device) if needs_dkv else None
    dv = torch.zeros(v_blocks.shape, dtype=wide, device=q.device) if needs_dkv else None
    empty = kv_block_sizes.shape[0] == 0 or kv_indices.shape[3] == 0
    chunks = () if empty else iterate_rows(kv_indices, kv_num_blocks, kv_block_sizes, k.shape[1], block_size, D)
    for rows in chunks:
        q_rows, dout_rows = q_blocks[rows.span].to(wide), dout_blocks[rows.span].to(wide)
        keys, values = rows.gather(k_blocks, wide), rows.gather(v_blocks, wide)
        lse = lse_rows[rows.span].to(wide)
        scores = (q_rows @ keys.transpose(1, 2)) * (sm_scale * LOG2_E)
        # A row without a key has lse = -inf, and all its keys are masked.
        weights = torch.exp2(scores - lse.masked_fill(lse == -torch.inf, 0))
        weights = weights.masked_fill(~rows.key_valid[:, None], 0)
        dscores = weights * (dout_rows @ values.transpose(1, 2) - delta_rows[rows.span].to(wide))
        # Masked, not multiplied by zero: dout and delta of a row without keys may be NaN.
        dscores = dscores.masked_fill(~rows.key_valid[:, None], 0)
        if dq is not None:
            dq[rows.span] = dscores @ keys
        if dk is not None and dv is not None:
            C, M = rows.block_ids.shape
            no_key = ~rows.key_valid.view(C * M, block_size, 1)
            dk_rows = (dscores.transpose(1, 2) @ q_rows).view(C * M, block_size, D)
            dv_rows = (weights.transpose(1, 2) @ dout_rows).view(C * M, block_size, D)
            _add_rows(dk, rows.block_ids.flatten(), (dk_rows * sm_scale).masked_fill(no_key, 0))
            _add_rows(dv, rows.block_ids.flatten(), dv_rows.masked_fill(no_key, 0))
    return (
        None if dq is None else dq.view(B, H, S_q, D),
        None if dk is None else dk.view(k.shape),
        None if dv is None else dv.view(v.shape),
    )


def _add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """total[ids] += rows, in the same order on every run. Rows of unlisted entries are zero and go to block 0."""
    if total.is_cuda:
        # index_add_ uses atomics on CUDA; an accumulating index_put_ sorts first.
        total.index_put_((ids,), rows, accumulate=True)
    else:
        total.index_add_(0, ids, rows)
