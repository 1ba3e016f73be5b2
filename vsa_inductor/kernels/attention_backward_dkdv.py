"""Key pass of the block-sparse attention backward: one program per key tile, walks the transposed lists of its group.

    p = exp2(q k^T * scale_log2 - lse_log2)      ds = p * (dout v^T - delta)
    dk = sm_scale * ds^T q                       dv = p^T dout

It computes the transposes of p and ds directly, so that they are register operands of the second products. Its rows are
independent of each other: keys past the block's size (garbage, perhaps NaN) are not masked while walking, their rows
are written as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    q_desc,
    dout_desc,
    lse_ptr,
    delta_ptr,
    indices_ptr,
    offsets_ptr,
    sizes_ptr,
    dk_ptr,
    dv_ptr,
    sm_scale,
    scale_log2,
    kv_heads,
    num_row_tiles,
    q_len,
    list_len,
    num_kv_blocks,
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
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    FOLDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    STEPS: tl.constexpr = BLOCK // COLS
    pid = tl.program_id(0)
    head_index = pid // num_row_tiles
    tile = pid % num_row_tiles
    batch = head_index // kv_heads
    kv_head = head_index % kv_heads
    batch64 = batch.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    block = (tile * ROWS) // BLOCK
    first_row = (tile * ROWS).to(tl.int64)
    size = tl.load(sizes_ptr + block) - (tile * ROWS) % BLOCK

    offs_n = tl.arange(0, ROWS)
    offs_m = tl.arange(0, COLS)
    offs_d = tl.arange(0, PADDED_D)
    in_d = (offs_d < D)[None, :]
    k_tile = k_ptr + batch64 * stride_kb + kv_head64 * stride_kh + first_row * stride_kn
    v_tile = v_ptr + batch64 * stride_vb + kv_head64 * stride_vh + first_row * stride_vn
    k = tl.load(k_tile + offs_n[:, None] * stride_kn + offs_d[None, :], mask=in_d, other=0.0)
    v = tl.load(v_tile + offs_n[:, None] * stride_vn + offs_d[None, :], mask=in_d, other=0.0)
    q_offs = offs_m[:, None] * stride_qn + offs_d[None, :]
    dout_offs = offs_m[:, None] * stride_on + offs_d[None, :]
    rdK = tl.zeros([ROWS, PADDED_D], tl.float32)
    rdV = tl.zeros([ROWS, PADDED_D], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head = batch64 * (kv_heads * GROUP) + head
        q_base = q_ptr + batch64 * stride_qb + head.to(tl.int64) * stride_qh
        dout_base = dout_ptr + batch64 * stride_ob + head.to(tl.int64) * stride_oh
        lse_base = lse_ptr + q_head * q_len
        delta_base = delta_ptr + q_head * q_len
        offsets = offsets_ptr + q_head * (num_kv_blocks + 1) + block
        begin = tl.load(offsets)
        # A key tile without real keys owes zeros only.
        end = tl.where(size > 0, tl.load(offsets + 1), begin)
        list_ptr = indices_ptr + q_head * list_len + begin
        for step in tl.range(0, (end - begin) * STEPS, num_stages=STAGES):
            row = tl.load(list_ptr + step // STEPS) * BLOCK + (step % STEPS) * COLS
            if USE_TMA:
                desc_batch = 0 if FOLDED else batch
                desc_head = head_index * GROUP + member if FOLDED else head
                q = q_desc.load([desc_batch, desc_head, row, 0]).reshape(COLS, PADDED_D)
                dout = dout_desc.load([desc_batch, desc_head, row, 0]).reshape(COLS, PADDED_D)
            else:
                q_ptrs = q_base + row.to(tl.int64) * stride_qn + q_offs
                dout_ptrs = dout_base + row.to(tl.int64) * stride_on + dout_offs
                if PADDED_D == D:
                    q = tl.load(q_ptrs)
                    dout = tl.load(dout_ptrs)
                else:
                    q = tl.load(q_ptrs, mask=in_d, other=0.0)
                    dout = tl.load(dout_ptrs, mask=in_d, other=0.0)
            lse = tl.load(lse_base + row + offs_m)
            delta = tl.load(delta_base + row + offs_m)
            qk_t = tl.dot(k, q.T, input_precision="ieee")
            p_t = tl.math.exp2(qk_t * scale_log2 - lse[None, :])
            dp_t = tl.dot(v, dout.T, input_precision="ieee")
            rdV = tl.dot(p_t.to(dout.dtype), dout, rdV, input_precision="ieee")
            ds_t = p_t * (dp_t - delta[None, :])
            rdK = tl.dot(ds_t.to(q.dtype), q, rdK, input_precision="ieee")

    real = (offs_n < size)[:, None]
    dk = tl.where(real, rdK * sm_scale, 0.0).to(dk_ptr.dtype.element_ty)
    dv = tl.where(real, rdV, 0.0).to(dv_ptr.dtype.element_ty)
    row64 = head_index.to(tl.int64) * num_row_tiles * ROWS + tile * ROWS
    offs = row64 * D + offs_n[:, None] * D + offs_d[None, :]
    tl.store(dk_ptr + offs, dk, mask=in_d)
    tl.store(dv_ptr + offs, dv, mask=in_d)
