"""Gluon kernels for sm_100a: tensor memory, tcgen05 products, tensor copies, warp specialisation, launch control."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    clc,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tma,
)


@gluon.jit
def tensor_memory_round_trip(
    source_ptr,
    target_ptr,
    M: gl.constexpr,
    N: gl.constexpr,
    STRIDE: gl.constexpr,
    STORE: gl.constexpr,
    LOAD: gl.constexpr,
):
    """A tile goes into tensor memory by one register layout and comes back by another: they must agree on addresses."""
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    m = gl.arange(0, M, gl.SliceLayout(1, rows))
    n = gl.arange(0, N, gl.SliceLayout(0, rows))
    where = m[:, None] * N + n[None, :]
    dtype: gl.constexpr = source_ptr.dtype.element_ty
    tile = allocate_tensor_memory(dtype, [M, N], TensorMemoryLayout([M, N], STRIDE))
    value = gl.load(source_ptr + where)
    tile.store(gl.convert_layout(value, tile.get_reg_layout(instr_variant=STORE)))
    back = tile.load(tile.get_reg_layout(instr_variant=LOAD))
    gl.store(target_ptr + where, gl.convert_layout(back, rows))


@gluon.jit
def tcgen05_product(
    a_ptr,
    b_ptr,
    c_ptr,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    SWIZZLE_A: gl.constexpr,
    SWIZZLE_B: gl.constexpr,
    TRANSPOSED_A: gl.constexpr,
    TRANSPOSED_B: gl.constexpr,
    A_IN_TENSOR_MEMORY: gl.constexpr,
    LOAD: gl.constexpr,
):
    """One tile product with chosen swizzles, majors, block M and place of A; the result is read by a chosen layout."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    bits: gl.constexpr = a_ptr.dtype.element_ty.primitive_bitwidth
    a_layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE_A, bits, rank=2, transposed=TRANSPOSED_A)
    b_layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE_B, bits, rank=2, transposed=TRANSPOSED_B)
    m = gl.arange(0, M, gl.SliceLayout(1, rows))
    n = gl.arange(0, N, gl.SliceLayout(0, rows))
    km = gl.arange(0, K, gl.SliceLayout(0, rows))
    kn = gl.arange(0, K, gl.SliceLayout(1, rows))
    a = gl.load(a_ptr + m[:, None] * K + km[None, :])
    b = gl.load(b_ptr + kn[:, None] * N + n[None, :])
    b_shared = gl.allocate_shared_memory(b.dtype, [K, N], b_layout, b)
    accumulator = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], 1))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    if A_IN_TENSOR_MEMORY:
        a_tensor = allocate_tensor_memory(a.dtype, [M, K], TensorMemoryLayout([M, K], 1))
        a_tensor.store(gl.convert_layout(a, a_tensor.get_reg_layout()))
        fence_async_shared()
        tcgen05_mma(a_tensor, b_shared, accumulator, use_acc=False)
    else:
        a_shared = gl.allocate_shared_memory(a.dtype, [M, K], a_layout, a)
        fence_async_shared()
        tcgen05_mma(a_shared, b_shared, accumulator, use_acc=False)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    c = accumulator.load(accumulator.get_reg_layout(instr_variant=LOAD))
    gl.store(c_ptr + m[:, None] * N + n[None, :], gl.convert_layout(c, rows))


@gluon.jit
def shared_to_tensor_memory(source_desc, target_ptr, M: gl.constexpr, N: gl.constexpr):
    """tcgen05.cp of a float32 tile that a tensor copy brought, then a load into registers."""
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [M, N], source_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source_desc.nbytes_per_cta)
    tma.async_load(source_desc, [0, 0], bar, tile)
    mbarrier.wait(bar, 0)
    target = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], 1))
    tcgen05_copy(tile, target)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 1)
    mbarrier.invalidate(bar)
    value = gl.convert_layout(target.load(), rows)
    m = gl.arange(0, M, gl.SliceLayout(1, rows))
    n = gl.arange(0, N, gl.SliceLayout(0, rows))
    gl.store(target_ptr + m[:, None] * N + n[None, :], value)


@gluon.jit
def tensor_copies(source_desc, target_desc, added_desc, least_desc, row, column):
    """A tile is loaded at coordinates that may stick out, stored, added and min-reduced elsewhere."""
    tile = gl.allocate_shared_memory(source_desc.dtype, source_desc.block_shape, source_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source_desc.nbytes_per_cta)
    tma.async_load(source_desc, [row, column], bar, tile)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    tma.async_store(target_desc, [row, column], tile)
    tma.async_atomic_add(added_desc, [row, column], tile)
    tma.async_atomic_min(least_desc, [row, column], tile)
    tma.store_wait(0)


@gluon.jit
def gather_scatter(source_desc, target_desc, index_ptr, ROWS: gl.constexpr, column):
    """Rows named by an index list are gathered by tile::gather4 and scattered by tile::scatter4 to twice their row."""
    lanes: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
    indices = gl.load(index_ptr + gl.arange(0, ROWS, lanes))
    width: gl.constexpr = source_desc.block_shape[1]
    tile = gl.allocate_shared_memory(source_desc.dtype, [ROWS, width], source_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, ROWS * width * (source_desc.dtype.primitive_bitwidth // 8))
    tma.async_gather(source_desc, indices, column, bar, tile)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    tma.async_scatter(target_desc, indices * 2, column, tile)
    tma.store_wait(0)


@gluon.jit
def _load_tiles(a_desc, b_desc, a_ring, b_ring, full, empty, row, column, steps, STAGES: gl.constexpr):
    for step in range(steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [row, step * a_desc.block_shape[1]], full.index(stage), a_ring.index(stage))
        tma.async_load(b_desc, [column, step * b_desc.block_shape[1]], full.index(stage), b_ring.index(stage))


@gluon.jit
def _multiply_tiles(a_ring, b_ring, full, empty, done, accumulator, steps, STAGES: gl.constexpr):
    for step in range(steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        b = b_ring.index(stage).permute((1, 0))
        tcgen05_mma(a_ring.index(stage), b, accumulator, use_acc=step > 0, mbarriers=[empty.index(stage)])
    tcgen05_commit(done)


@gluon.jit
def _store_tile(c_desc, done, accumulator, row, column):
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    mbarrier.wait(done, 0)
    c.store(accumulator.load().to(c_desc.dtype))
    fence_async_shared()
    tma.async_store(c_desc, [row, column], c)
    tma.store_wait(0)


@gluon.jit
def warp_specialised_product(a_desc, b_desc, c_desc, steps, STAGES: gl.constexpr):
    """Producer, MMA issuer and epilogue in warps of their own over a ring of stages; B is [N, K]."""
    M: gl.constexpr = a_desc.block_shape[0]
    N: gl.constexpr = b_desc.block_shape[0]
    row = gl.program_id(0) * M
    column = gl.program_id(1) * N
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES, a_desc.block_shape[0], a_desc.block_shape[1]], a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, b_desc.block_shape[0], b_desc.block_shape[1]], b_desc.layout
    )
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    done = mbarrier.allocate_mbarrier()
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(done, count=1)
    accumulator = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], 1))
    gl.warp_specialize(
        [
            (_store_tile, (c_desc, done, accumulator, row, column)),
            (_load_tiles, (a_desc, b_desc, a_ring, b_ring, full, empty, row, column, steps, STAGES)),
            (_multiply_tiles, (a_ring, b_ring, full, empty, done, accumulator, steps, STAGES)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def cluster_product(a_desc, b_desc, c_desc, steps, PAIRED: gl.constexpr, MULTICAST: gl.constexpr):
    """A cluster of two CTAs, each with half of A's rows and of the result.

    PAIRED: every product is shared (cta_group::2), each CTA holds half of B's columns. Otherwise each multiplies for
    itself (cta_group::1), and with MULTICAST one copy brings all of B into both.
    """
    M: gl.constexpr = a_desc.block_shape[0]
    K: gl.constexpr = a_desc.block_shape[1]
    N: gl.constexpr = b_desc.block_shape[1]
    row = gl.program_id(0) * M
    column = gl.program_id(1) * N
    a = gl.allocate_shared_memory(a_desc.dtype, [M, K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [K, N], b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, [M, N], c_desc.layout)
    layout: gl.constexpr = TensorMemoryLayout([M // 2, N], 1, cga_layout=[[1, 0]], two_ctas=PAIRED)
    accumulator = allocate_tensor_memory(gl.float32, [M, N], layout)
    loaded = mbarrier.allocate_mbarrier(two_ctas=PAIRED)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=tcgen05_mma_barrier_count([a, b], MULTICAST, PAIRED))
    for step in range(steps):
        mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [row, step * K], loaded, a, multicast=MULTICAST)
        tma.async_load(b_desc, [step * K, column], loaded, b, multicast=MULTICAST)
        mbarrier.wait(loaded, step & 1)
        tcgen05_mma(a, b, accumulator, use_acc=step > 0, multicast=MULTICAST, mbarriers=[done])
        mbarrier.wait(done, step & 1)
    mbarrier.invalidate(loaded)
    mbarrier.invalidate(done)
    c.store(accumulator.load().to(c_desc.dtype))
    fence_async_shared()
    tma.async_store(c_desc, [row, column], c)
    tma.store_wait(0)


@gluon.jit
def launch_control(source_ptr, target_ptr, BLOCK: gl.constexpr):
    """Programs double their block, then cancel launches that are still pending and double those blocks too."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    response = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    block = gl.program_id(0)
    phase = 0
    more = True
    while more:
        # The response was read by ordinary loads; the next one is written by the asynchronous proxy.
        fence_async_shared()
        mbarrier.expect(bar, 16)
        clc.try_cancel(response, bar)
        where = block * BLOCK + gl.arange(0, BLOCK, lanes)
        gl.store(target_ptr + where, gl.load(source_ptr + where) * 2)
        mbarrier.wait(bar, phase)
        phase ^= 1
        answer = clc.load_result(response)
        more = answer.is_canceled()
        block = answer.program_id(0)
        gl.barrier()
    mbarrier.invalidate(bar)
