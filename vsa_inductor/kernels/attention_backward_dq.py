"""Query pass of the block-sparse attention backward: one program per query tile, walks kv_indices.

    p = exp2(q k^T * scale_log2 - lse_log2)      ds = p * (dout v^T - delta)      dq = sm_scale * ds k

Garbage in empty slots (see attention.py): V only reaches its own column of ds, which is masked; K rows are loaded as
zero by the pointer route, and the descriptor route walks again, through the pointer route, when NaN came out.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _walk_keys(
    q,
    dout,
    lse,
    delta,
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
    k_offs = offs_n[:, None] * stride_kn + offs_d[None, :]
    v_offs = offs_n[:, None] * stride_vn + offs_d[None, :]
    in_d = (offs_d < D)[None, :]
    rdQ = tl.zeros([ROWS, PADDED_D], tl.float32)
    for step in tl.range(0, count * STEPS, num_stages=STAGES):
        block = tl.load(list_ptr + (step // STEPS) * stride_list)
        first = (step % STEPS) * COLS
        size = tl.load(sizes_ptr + block) - first
        row = block * BLOCK + first
        if USE_TMA:
            k = k_desc.load([desc_batch, desc_head, row, 0]).reshape(COLS, PADDED_D)
            v = v_desc.load([desc_batch, desc_head, row, 0]).reshape(COLS, PADDED_D)
        else:
            k_mask = (offs_n < size)[:, None]
            k_ptrs = k_base + row.to(tl.int64) * stride_kn + k_offs
            v_ptrs = v_base + row.to(tl.int64) * stride_vn + v_offs
            if PADDED_D == D:
                k = tl.load(k_ptrs, mask=k_mask, other=0.0)
                v = tl.load(v_ptrs)
            else:
                k = tl.load(k_ptrs, mask=k_mask & in_d, other=0.0)
                v = tl.load(v_ptrs, mask=in_d, other=0.0)
        qk = tl.dot(q, k.T, input_precision="ieee")
        p = tl.math.exp2(qk * scale_log2 - lse[:, None])
        dp = tl.dot(dout, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        if size < COLS:
            ds = tl.where((offs_n < size)[None, :], ds, 0.0)
        rdQ = tl.dot(ds.to(k.dtype), k, rdQ, input_precision="ieee")
    return rdQ


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    k_desc,
    v_desc,
    lse_ptr,
    delta_ptr,
    indices_ptr,
    counts_ptr,
    sizes_ptr,
    dq_ptr,
    sm_scale,
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
    stride_ob,
    stride_oh,
    stride_on,
    stride_ib,
    stride_ih,
    stride_in,
    stride_im,
    stride_cb,
    stride_ch,
    stride_cn,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    FOLDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    head_index = pid // num_row_tiles
    tile = pid % num_row_tiles
    batch = head_index // heads
    head = head_index % heads
    kv_head = head // group
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    q_block = ((tile * ROWS) // BLOCK).to(tl.int64)
    first_row = (tile * ROWS).to(tl.int64)

    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, PADDED_D)
    in_d = (offs_d < D)[None, :]
    q_tile = q_ptr + batch64 * stride_qb + head64 * stride_qh + first_row * stride_qn
    dout_tile = dout_ptr + batch64 * stride_ob + head64 * stride_oh + first_row * stride_on
    q = tl.load(q_tile + offs_m[:, None] * stride_qn + offs_d[None, :], mask=in_d, other=0.0)
    dout = tl.load(dout_tile + offs_m[:, None] * stride_on + offs_d[None, :], mask=in_d, other=0.0)
    row64 = head_index.to(tl.int64) * num_row_tiles * ROWS + tile * ROWS
    lse = tl.load(lse_ptr + row64 + offs_m)
    delta = tl.load(delta_ptr + row64 + offs_m)
    # An empty row: probability exp2(-inf) = 0 instead of exp2(+inf).
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    list_ptr = indices_ptr + batch64 * stride_ib + head64 * stride_ih + q_block * stride_in
    count = tl.load(counts_ptr + batch64 * stride_cb + head64 * stride_ch + q_block * stride_cn)
    k_base = k_ptr + batch64 * stride_kb + kv_head64 * stride_kh
    v_base = v_ptr + batch64 * stride_vb + kv_head64 * stride_vh

    rdQ = _walk_keys(
        q,
        dout,
        lse,
        delta,
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
        unclean = tl.max(tl.max(tl.where(rdQ != rdQ, 1, 0), 1), 0)
        if unclean > 0:
            # 16 keys at a step: the repetition must not raise the register count of the program.
            rdQ = _walk_keys(
                q,
                dout,
                lse,
                delta,
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
    dq = (rdQ * sm_scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + row64 * D + offs_m[:, None] * D + offs_d[None, :], dq, mask=in_d)
