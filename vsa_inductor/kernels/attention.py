"""Block-sparse attention, forward, in Triton.

    q   [B, Hq, Sq, D]     out      [B, Hq, Sq, D]     Sq = N_q * block_size
    k,v [B, Hkv, Skv, D]   lse_log2 [B, Hq, Sq] fp32   Skv = N_kv * block_size

One program owns ROWS queries of one head and walks the list of their block, COLS keys at a step (a block larger than
COLS is several steps: splitting is exact). Running maximum rM, running sum rL, accumulator rO; the softmax scale is
folded into exp2.

Empty slots may hold NaN. In K they only reach their own column of the scores, which is masked. In V they would meet a
probability of exactly zero and give NaN, so:
  pointer route     V rows past the block's size are loaded as zero;
  descriptor route  a descriptor cannot mask rows and masking in registers costs a trip through them, so the walk
                    assumes clean rows; a NaN in rO at the end repeats it through the pointer route. Clean inputs,
                    which the tile operators guarantee, never pay for it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from vsa_inductor.kernels.configs import (
    LaunchConfig,
    attention_config,
    capability_of,
    on_device_of,
    padded_head_dim,
)
from vsa_inductor.kernels.descriptors import row_descriptor, streaming_plan


@triton.jit
def _walk_list(
    q,
    k_base,
    v_base,
    k_desc,
    v_desc,
    list_ptr,
    stride_list,
    count,
    sizes_ptr,
    desc_batch,
    desc_head,
    stride_kn,
    stride_vn,
    scale_log2,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    STEPS: tl.constexpr = BLOCK // COLS
    offs_n = tl.arange(0, COLS)
    offs_d = tl.arange(0, PADDED_D)
    in_d = offs_d < D
    k_offs = offs_n[:, None] * stride_kn + offs_d[None, :]
    v_offs = offs_n[:, None] * stride_vn + offs_d[None, :]
    rM = tl.full([ROWS], float("-inf"), tl.float32)
    rL = tl.zeros([ROWS], tl.float32)
    rO = tl.zeros([ROWS, PADDED_D], tl.float32)
    for step in tl.range(0, count * STEPS, num_stages=STAGES):
        block = tl.load(list_ptr + (step // STEPS) * stride_list)
        first = (step % STEPS) * COLS
        size = tl.load(sizes_ptr + block) - first
        row = block * BLOCK + first
        if USE_TMA:
            k = k_desc.load([desc_batch, desc_head, row, 0]).reshape(COLS, PADDED_D)
            v = v_desc.load([desc_batch, desc_head, row, 0]).reshape(COLS, PADDED_D)
        else:
            v_mask = (offs_n < size)[:, None]
            k_ptrs = k_base + row.to(tl.int64) * stride_kn + k_offs
            v_ptrs = v_base + row.to(tl.int64) * stride_vn + v_offs
            if PADDED_D == D:
                k = tl.load(k_ptrs)
                v = tl.load(v_ptrs, mask=v_mask, other=0.0)
            else:
                k = tl.load(k_ptrs, mask=in_d[None, :], other=0.0)
                v = tl.load(v_ptrs, mask=v_mask & in_d[None, :], other=0.0)
        qk = tl.dot(q, k.T, input_precision="ieee")
        # Uniform branch: full blocks, the common case, pay no per-element compare and select.
        if size < COLS:
            qk = tl.where((offs_n < size)[None, :], qk, float("-inf"))
        rM_next = tl.maximum(rM, tl.max(qk, 1) * scale_log2)
        # A row whose keys so far are all masked has maximum -inf: subtract 0 instead, never -inf from -inf.
        shift = tl.where(rM_next == float("-inf"), 0.0, rM_next)
        p = tl.math.exp2(qk * scale_log2 - shift[:, None])
        alpha = tl.math.exp2(rM - shift)
        rL = rL * alpha + tl.sum(p, 1)
        rO = rO * alpha[:, None]
        rO = tl.dot(p.to(v.dtype), v, rO, input_precision="ieee")
        rM = rM_next
    return rO, rL, rM


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    indices_ptr,
    counts_ptr,
    sizes_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    heads,
    group,
    num_row_tiles,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ib,
    stride_ih,
    stride_in,
    stride_im,
    stride_cb,
    stride_ch,
    stride_cn,
    WRITE_LSE: tl.constexpr,
    NEGATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    FOLDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Heads are the outer axis of the grid: programs in flight share one head's K and V in L2.
    pid = tl.program_id(0)
    head_index = pid // num_row_tiles
    tile = pid % num_row_tiles
    batch = head_index // heads
    head = head_index % heads
    kv_head = head // group
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    q_block = (tile * ROWS) // BLOCK

    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, PADDED_D)
    q_tile = q_ptr + batch64 * stride_qb + head64 * stride_qh + (tile * ROWS).to(tl.int64) * stride_qn
    q_ptrs = q_tile + offs_m[:, None] * stride_qn + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_d < D)[None, :], other=0.0)
    if NEGATE:
        q = -q
    list_ptr = indices_ptr + batch64 * stride_ib + head64 * stride_ih + q_block.to(tl.int64) * stride_in
    count = tl.load(counts_ptr + batch64 * stride_cb + head64 * stride_ch + q_block.to(tl.int64) * stride_cn)
    k_base = k_ptr + batch64 * stride_kb + kv_head64 * stride_kh
    v_base = v_ptr + batch64 * stride_vb + kv_head64 * stride_vh

    rO, rL, rM = _walk_list(
        q,
        k_base,
        v_base,
        k_desc,
        v_desc,
        list_ptr,
        stride_im,
        count,
        sizes_ptr,
        0 if FOLDED else batch,
        head_index // group if FOLDED else kv_head,
        stride_kn,
        stride_vn,
        scale_log2,
        ROWS,
        COLS,
        BLOCK,
        D,
        PADDED_D,
        USE_TMA,
        STAGES,
    )
    if USE_TMA:
        unclean = tl.max(tl.max(tl.where(rO != rO, 1, 0), 1), 0)
        if unclean > 0:
            # 16 keys at a step: the repetition must not raise the register count of the program.
            rO, rL, rM = _walk_list(
                q,
                k_base,
                v_base,
                k_desc,
                v_desc,
                list_ptr,
                stride_im,
                count,
                sizes_ptr,
                0,
                0,
                stride_kn,
                stride_vn,
                scale_log2,
                ROWS,
                16,
                BLOCK,
                D,
                PADDED_D,
                False,
                1,
            )

    total = tl.where(rL == 0.0, 1.0, rL)
    out = rO / total[:, None]
    row64 = head_index.to(tl.int64) * num_row_tiles * ROWS + tile * ROWS
    out_ptrs = out_ptr + row64 * D + offs_m[:, None] * D + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(offs_d < D)[None, :])
    if WRITE_LSE:
        tl.store(lse_ptr + row64 + offs_m, rM + tl.math.log2(total))


def launch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_num_blocks: torch.Tensor,
    kv_block_sizes: torch.Tensor,
    sm_scale: float,
    block_size: int,
    out: torch.Tensor,
    lse_log2: torch.Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Run the forward pass into `out` and, unless it is empty, `lse_log2`.

    Args:
        q: `[B, Hq, Sq, D]` bf16, fp16 or fp32, last stride 1, rows 16-byte aligned. D a multiple of 16 up to 256.
        k, v: `[B, Hkv, Skv, D]`, the same dtype; Hq is a multiple of Hkv.
        kv_indices: `[B, Hq, N_q, M]` int32, any strides; entries at or past the count are never read.
        kv_num_blocks: `[B, Hq, N_q]` int32, any strides.
        kv_block_sizes: `[N_kv]` int32, 0..block_size.
        sm_scale: softmax scale of the natural exponential.
        block_size: 64, 128 or 256.
        out: `[B, Hq, Sq, D]` contiguous, written everywhere.
        lse_log2: `[B, Hq, Sq]` fp32 contiguous, or empty.
        config: overrides the table (benchmarks and tests).
    """
    batch, heads, q_len, head_dim = q.shape
    if q.numel() == 0:
        return
    config = config or attention_config("forward", head_dim, q.element_size(), block_size, capability_of(q))
    config, folded = streaming_plan(config, k, v)
    width = padded_head_dim(head_dim)
    num_row_tiles = q_len // config.rows
    with on_device_of(q):
        _attention_kernel[(batch * heads * num_row_tiles,)](
            q,
            k,
            v,
            row_descriptor(k, config.cols, width, folded) if config.use_tma else None,
            row_descriptor(v, config.cols, width, folded) if config.use_tma else None,
            kv_indices,
            kv_num_blocks,
            kv_block_sizes,
            out,
            lse_log2,
            abs(sm_scale) * math.log2(math.e),
            heads,
            heads // k.shape[1],
            num_row_tiles,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *kv_indices.stride(),
            *kv_num_blocks.stride(),
            WRITE_LSE=lse_log2.numel() > 0,
            NEGATE=sm_scale < 0,
            ROWS=config.rows,
            COLS=config.cols,
            BLOCK=block_size,
            D=head_dim,
            PADDED_D=width,
            USE_TMA=config.use_tma,
            FOLDED=folded,
            STAGES=config.num_stages,
            **config.options(),
        )
