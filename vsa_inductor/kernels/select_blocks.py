"""Top-k selection of kv blocks in one launch, without a sort and without a dense mask.

    scores [B, H, N_q, N_kv]  ->  kv_indices [B, H, N_q, M] ascending, kv_num_blocks [B, H, N_q] = M = num_forced + k

One program per row. Scores become int32 keys that order as the scores do (NaN below -inf, -0.0 = 0.0). The k-th largest
key is found bit by bit, 32 counting steps; blocks above it are in, ties fill up from the lowest id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import on_device_of


@triton.jit
def _select_blocks_kernel(
    scores_ptr,
    indices_ptr,
    counts_ptr,
    k,
    num_forced,
    num_kv,
    width,
    heads,
    num_q,
    stride_sb,
    stride_sh,
    stride_sn,
    stride_sm,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    batch = (row // num_q // heads).to(tl.int64)
    head = (row // num_q % heads).to(tl.int64)
    q_block = (row % num_q).to(tl.int64)
    offs = tl.arange(0, PADDED)
    valid = offs < num_kv
    scores = scores_ptr + batch * stride_sb + head * stride_sh + q_block * stride_sn
    x = tl.load(scores + offs.to(tl.int64) * stride_sm, mask=valid, other=0.0).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    LOWEST: tl.constexpr = -0x80000000
    key = tl.where(x != x, LOWEST + 1, key)
    forced = offs < num_forced
    ranked = valid & (offs >= num_forced)
    key = tl.where(ranked, key, LOWEST)

    # Invariant: at least k keys are >= threshold. Adding the sign bit first wraps from the lowest int to zero.
    threshold = tl.full([], LOWEST, tl.int32)
    step = tl.full([], LOWEST, tl.int32)
    for bit in range(32):
        candidate = threshold + step
        reached = tl.sum((key >= candidate).to(tl.int32), 0)
        threshold = tl.where(reached >= k, candidate, threshold)
        step = tl.where(bit == 0, 0x40000000, step >> 1)
    above = key > threshold
    tie = ranked & (key == threshold)
    room = k - tl.sum(above.to(tl.int32), 0)
    chosen = forced | above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(indices_ptr + row.to(tl.int64) * width + place, offs, mask=chosen)
    tl.store(counts_ptr + row, width)


def launch_select_blocks(
    scores: torch.Tensor, k: int, num_forced: int, kv_indices: torch.Tensor, kv_num_blocks: torch.Tensor
) -> None:
    """Select the first `num_forced` kv blocks and the `k` best of the rest.

    Args:
        scores: `[B, H, N_q, N_kv]` fp32, bf16 or fp16, any strides; N_kv up to 65536.
        k: best blocks per row, 0..N_kv - num_forced.
        num_forced: leading blocks that are always in.
        kv_indices: `[B, H, N_q, num_forced + k]` int32 contiguous, written everywhere.
        kv_num_blocks: `[B, H, N_q]` int32 contiguous, written everywhere.
    """
    batch, heads, num_q, num_kv = scores.shape
    rows = batch * heads * num_q
    if rows == 0:
        return
    padded = max(32, triton.next_power_of_2(num_kv))
    # 16 to 64 keys per thread: fewer warps leave room for more rows in flight, more keys would not fit in registers.
    num_warps = min(32, max(1, padded // 512))
    with on_device_of(scores):
        _select_blocks_kernel[(rows,)](
            scores,
            kv_indices,
            kv_num_blocks,
            k,
            num_forced,
            num_kv,
            num_forced + k,
            heads,
            num_q,
            *scores.stride(),
            PADDED=padded,
            num_warps=num_warps,
        )
