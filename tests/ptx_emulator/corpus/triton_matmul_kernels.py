"""Triton matrix products C[M, N] = A[M, K] B[K, N], one function per way of moving the operands."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Pointers and cp.async; any strides of A and B, masks for the tails, an accumulator of any type."""
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    a_rows = a_ptr + rm[:, None] * stride_am
    b_columns = b_ptr + rn[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    for k in range(0, K, BLOCK_K):
        ks = k + rk
        if MASKED:
            a = tl.load(a_rows + ks[None, :] * stride_ak, mask=(rm[:, None] < M) & (ks[None, :] < K), other=0.0)
            b = tl.load(b_columns + ks[:, None] * stride_bk, mask=(ks[:, None] < K) & (rn[None, :] < N), other=0.0)
        else:
            a = tl.load(a_rows + ks[None, :] * stride_ak)
            b = tl.load(b_columns + ks[:, None] * stride_bk)
        accumulator = tl.dot(a, b, accumulator, out_dtype=ACCUMULATOR)
    c = accumulator.to(c_ptr.dtype.element_ty)
    if MASKED:
        tl.store(c_ptr + rm[:, None] * N + rn[None, :], c, mask=(rm[:, None] < M) & (rn[None, :] < N))
    else:
        tl.store(c_ptr + rm[:, None] * N + rn[None, :], c)


@triton.jit
def matmul_split_k(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """K is dealt over the third grid dimension; the parts meet in C by atomic additions."""
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K * SPLITS):
        a = tl.load(a_ptr + rm[:, None] * K + (k + rk)[None, :])
        b = tl.load(b_ptr + (k + rk)[:, None] * N + rn[None, :])
        accumulator = tl.dot(a, b, accumulator)
    tl.atomic_add(c_ptr + rm[:, None] * N + rn[None, :], accumulator)


@triton.jit
def matmul_device_descriptors(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """Tensor maps made by the kernel in global scratch memory; B is given as [N, K]; optionally warp-specialised."""
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    row = tl.program_id(0) * BLOCK_M
    column = tl.program_id(1) * BLOCK_N
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=WARP_SPECIALIZE):
        a = a_desc.load([row, k])
        b = b_desc.load([column, k])
        accumulator = tl.dot(a, b.T, accumulator)
    c_desc.store([row, column], accumulator.to(c_ptr.dtype.element_ty))


@triton.jit
def matmul_host_descriptors(
    a_desc,
    b_desc,
    c_desc,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    TRANSPOSED_A: tl.constexpr,
    TRANSPOSED_B: tl.constexpr,
):
    """Tensor maps passed as parameters; A is [K, M] and B is [N, K] when transposed."""
    row = tl.program_id(0) * BLOCK_M
    column = tl.program_id(1) * BLOCK_N
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=WARP_SPECIALIZE):
        a = a_desc.load([k, row]).T if TRANSPOSED_A else a_desc.load([row, k])
        b = b_desc.load([column, k]).T if TRANSPOSED_B else b_desc.load([k, column])
        accumulator = tl.dot(a, b, accumulator)
    c_desc.store([row, column], accumulator.to(c_desc.dtype))


@triton.jit
def matmul_persistent(
    a_desc,
    b_desc,
    c_desc,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """Each program walks over tiles; the tile loop is flattened into the K loop and may be warp-specialised."""
    columns = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * columns
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True, warp_specialize=WARP_SPECIALIZE):
        row = (tile // columns) * BLOCK_M
        column = (tile % columns) * BLOCK_N
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            accumulator = tl.dot(a_desc.load([row, k]), b_desc.load([column, k]).T, accumulator)
        c_desc.store([row, column], accumulator.to(c_desc.dtype))
