"""Triton attention: forward (plain, warp-specialised, block-sparse) and backward.

Q, K, V, O are [HEADS, length, D] with the head as the second grid dimension; `scale` multiplies the scores; LSE is the
natural logarithm of the sum of exponentials, [HEADS, length] in float32; delta is the row sum of O * dO.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Pointers; online softmax; the causal mask is applied in every block that the diagonal can touch."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + (head * queries + rows)[:, None] * D + d[None, :])
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, D), tl.float32)
    end = keys
    if CAUSAL:
        end = min(keys, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        where = (head * keys + start + columns)[:, None] * D + d[None, :]
        scores = tl.dot(q, tl.load(k_ptr + where).T) * (scale * LOG2E)
        if CAUSAL:
            scores = tl.where(rows[:, None] >= (start + columns)[None, :], scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        alpha = tl.exp2(maximum - new)
        total = total * alpha + tl.sum(p, 1)
        out = tl.dot(p.to(q.dtype), tl.load(v_ptr + where), out * alpha[:, None])
        maximum = new
    tl.store(lse_ptr + head * queries + rows, (maximum + tl.log2(total)) * LN2)
    out = out / total[:, None]
    tl.store(o_ptr + (head * queries + rows)[:, None] * D + d[None, :], out.to(o_ptr.dtype.element_ty))


@triton.jit
def attention_descriptors(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """Host tensor descriptors over [HEADS * length, D]; the key loop may be warp-specialised."""
    head = tl.program_id(1)
    row = head * queries + tl.program_id(0) * BLOCK_M
    q = q_desc.load([row, 0])
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, D), tl.float32)
    for start in tl.range(0, keys, BLOCK_N, warp_specialize=WARP_SPECIALIZE):
        k = k_desc.load([head * keys + start, 0])
        scores = tl.dot(q, k.T)
        new = tl.maximum(maximum, tl.max(scores, 1) * (scale * LOG2E))
        p = tl.exp2(scores * (scale * LOG2E) - new[:, None])
        alpha = tl.exp2(maximum - new)
        total = total * alpha + tl.sum(p, 1)
        out = out * alpha[:, None]
        v = v_desc.load([head * keys + start, 0])
        out = tl.dot(p.to(v.dtype), v, out)
        maximum = new
    tl.store(lse_ptr + row + tl.arange(0, BLOCK_M), (maximum + tl.log2(total)) * LN2)
    o_desc.store([row, 0], (out / total[:, None]).to(o_desc.dtype))


@triton.jit
def attention_blocks(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    index_ptr,
    count_ptr,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Block-sparse forward: a query block visits the key blocks that index[head, block, :count] lists."""
    head = tl.program_id(1)
    block = tl.program_id(0)
    blocks = queries // BLOCK
    lanes = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    here = (head * queries + block * BLOCK + lanes)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + here)
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, D), tl.float32)
    count = tl.load(count_ptr + head * blocks + block)
    for slot in range(0, count):
        key_block = tl.load(index_ptr + (head * blocks + block) * SLOTS + slot)
        where = (head * keys + key_block * BLOCK + lanes)[:, None] * D + d[None, :]
        scores = tl.dot(q, tl.load(k_ptr + where).T) * (scale * LOG2E)
        new = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        alpha = tl.exp2(maximum - new)
        total = total * alpha + tl.sum(p, 1)
        out = tl.dot(p.to(q.dtype), tl.load(v_ptr + where), out * alpha[:, None])
        maximum = new
    tl.store(o_ptr + here, (out / total[:, None]).to(o_ptr.dtype.element_ty))


@triton.jit
def attention_delta(o_ptr, do_ptr, delta_ptr, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta[row] = sum of O * dO over D."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    where = rows[:, None] * D + tl.arange(0, D)[None, :]
    products = tl.load(o_ptr + where).to(tl.float32) * tl.load(do_ptr + where).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(products, 1))


@triton.jit
def attention_backward(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One key block per program: dK and dV stay in the accumulators, dQ (float32) meets by atomic additions."""
    head = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    here = (head * keys + columns)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + here)
    v = tl.load(v_ptr + here)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for start in range(0, queries, BLOCK_M):
        rows = head * queries + start + tl.arange(0, BLOCK_M)
        where = rows[:, None] * D + d[None, :]
        q = tl.load(q_ptr + where)
        do = tl.load(do_ptr + where)
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
        pt = tl.exp2(tl.dot(k, q.T) * (scale * LOG2E) - lse[None, :] * LOG2E)
        dv = tl.dot(pt.to(q.dtype), do, dv)
        dst = (pt * (tl.dot(v, do.T) - delta[None, :]) * scale).to(q.dtype)
        dk = tl.dot(dst, q, dk)
        tl.atomic_add(dq_ptr + where, tl.dot(dst.T, k))
    tl.store(dk_ptr + here, dk.to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + here, dv.to(dv_ptr.dtype.element_ty))


@triton.jit
def attention_backward_descriptors(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_ptr,
    delta_ptr,
    dq_desc,
    dk_desc,
    dv_desc,
    queries,
    keys,
    scale,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """As attention_backward with tensor descriptors: dQ is added by bulk tensor reductions."""
    head = tl.program_id(1)
    column = head * keys + tl.program_id(0) * BLOCK_N
    k = k_desc.load([column, 0])
    v = v_desc.load([column, 0])
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for start in tl.range(0, queries, BLOCK_M, warp_specialize=WARP_SPECIALIZE):
        row = head * queries + start
        q = q_desc.load([row, 0])
        do = do_desc.load([row, 0])
        rows = row + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
        pt = tl.exp2(tl.dot(k, q.T) * (scale * LOG2E) - lse[None, :] * LOG2E)
        dv = tl.dot(pt.to(q.dtype), do, dv)
        dst = (pt * (tl.dot(v, do.T) - delta[None, :]) * scale).to(q.dtype)
        dk = tl.dot(dst, q, dk)
        dq_desc.atomic_add([row, 0], tl.dot(dst.T, k))
    dk_desc.store([column, 0], dk.to(dk_desc.dtype))
    dv_desc.store([column, 0], dv.to(dv_desc.dtype))
