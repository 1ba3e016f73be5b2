"""Gluon kernels for sm_90a: wgmma from shared memory and registers, rings of stages, clusters; and async copies."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    async_store,
    cluster,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def wgmma_product(
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
    A_IN_REGISTERS: gl.constexpr,
    INSTRUCTION_K: gl.constexpr,
):
    """One tile product with chosen swizzles and majors, A from shared memory or registers."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    bits: gl.constexpr = a_ptr.dtype.element_ty.primitive_bitwidth
    a_layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE_A, bits, rank=2, transposed=TRANSPOSED_A)
    b_layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE_B, bits, rank=2, transposed=TRANSPOSED_B)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, INSTRUCTION_K])
    m = gl.arange(0, M, gl.SliceLayout(1, rows))
    n = gl.arange(0, N, gl.SliceLayout(0, rows))
    km = gl.arange(0, K, gl.SliceLayout(0, rows))
    kn = gl.arange(0, K, gl.SliceLayout(1, rows))
    a = gl.load(a_ptr + m[:, None] * K + km[None, :])
    b = gl.load(b_ptr + kn[:, None] * N + n[None, :])
    b_shared = gl.allocate_shared_memory(b.dtype, [K, N], b_layout, b)
    accumulator = gl.zeros((M, N), gl.float32, mma)
    if A_IN_REGISTERS:
        a_fragment = gl.convert_layout(a, gl.DotOperandLayout(0, mma, 32 // bits))
        fence_async_shared()
        accumulator = warpgroup_mma(a_fragment, b_shared, accumulator, use_acc=False)
    else:
        a_shared = gl.allocate_shared_memory(a.dtype, [M, K], a_layout, a)
        fence_async_shared()
        accumulator = warpgroup_mma(a_shared, b_shared, accumulator, use_acc=False)
    gl.store(c_ptr + m[:, None] * N + n[None, :], gl.convert_layout(accumulator, rows))


@gluon.jit
def _load_tiles(a_desc, b_desc, a_ring, b_ring, full, empty, row, column, steps, STAGES: gl.constexpr):
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [row, step * a_desc.block_shape[1]], full.index(stage), a_ring.index(stage))
        tma.async_load(b_desc, [step * b_desc.block_shape[0], column], full.index(stage), b_ring.index(stage))


@gluon.jit
def _multiply_tiles(a_ring, b_ring, full, empty, c_desc, row, column, steps, STAGES: gl.constexpr):
    M: gl.constexpr = c_desc.block_shape[0]
    N: gl.constexpr = c_desc.block_shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    accumulator = gl.zeros((M, N), gl.float32, mma)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        accumulator = warpgroup_mma(a_ring.index(stage), b_ring.index(stage), accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(1, deps=[accumulator])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    value = warpgroup_mma_wait(0, deps=[accumulator])
    c = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    c.store(value.to(c_desc.dtype))
    fence_async_shared()
    tma.async_store(c_desc, [row, column], c)
    tma.store_wait(0)


@gluon.jit
def warp_specialised_product(a_desc, b_desc, c_desc, steps, STAGES: gl.constexpr):
    """One producer warp and one consumer warpgroup over a ring of stages, one wgmma group kept in flight."""
    row = gl.program_id(0) * a_desc.block_shape[0]
    column = gl.program_id(1) * b_desc.block_shape[1]
    a_ring = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES, a_desc.block_shape[0], a_desc.block_shape[1]], a_desc.layout
    )
    b_ring = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, b_desc.block_shape[0], b_desc.block_shape[1]], b_desc.layout
    )
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply_tiles, (a_ring, b_ring, full, empty, c_desc, row, column, steps, STAGES)),
            (_load_tiles, (a_desc, b_desc, a_ring, b_ring, full, empty, row, column, steps, STAGES)),
        ],
        [1],
        [40],
    )


@gluon.jit
def cluster_product(a_desc, b_desc, c_desc, steps):
    """Two CTAs with half of the rows each; one multicast copy brings all of B into both."""
    M: gl.constexpr = a_desc.block_shape[0]
    K: gl.constexpr = a_desc.block_shape[1]
    N: gl.constexpr = b_desc.block_shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16], cga_layout=[[1, 0]])
    row = gl.program_id(0) * M
    column = gl.program_id(1) * N
    a = gl.allocate_shared_memory(a_desc.dtype, [M, K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [K, N], b_desc.layout)
    loaded = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.fence_init_release_cluster()
    cluster.barrier(relaxed=True)
    accumulator = gl.zeros((M, N), gl.float32, mma)
    for step in range(steps):
        mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [row, step * K], loaded, a, multicast=True)
        tma.async_load(b_desc, [step * K, column], loaded, b, multicast=True)
        mbarrier.wait(loaded, step & 1)
        accumulator = warpgroup_mma(a, b, accumulator)
        cluster.barrier()
    mbarrier.invalidate(loaded)
    c = gl.allocate_shared_memory(c_desc.dtype, [M, N], c_desc.layout)
    c.store(accumulator.to(c_desc.dtype))
    fence_async_shared()
    tma.async_store(c_desc, [row, column], c)
    tma.store_wait(0)


@gluon.jit
def remote_store(
    source_ptr,
    target_ptr,
    M: gl.constexpr,
    N: gl.constexpr,
    by_rows: gl.constexpr,
    by_columns: gl.constexpr,
    shared: gl.constexpr,
):
    """A pair of CTAs trades halves: split by rows in registers, by columns in shared memory, st.async between them."""
    buffer = gl.allocate_shared_memory(gl.float32, [M, N], shared)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.fence_init_release_cluster()
    cluster.barrier(relaxed=True)
    mbarrier.expect(bar, M * N // 2 * 4)
    m = gl.arange(0, M, gl.SliceLayout(1, by_rows))
    n = gl.arange(0, N, gl.SliceLayout(0, by_rows))
    async_store(buffer, gl.load(source_ptr + m[:, None] * N + n[None, :]), bar)
    mbarrier.wait(bar, 0)
    got = buffer.load(by_columns)
    cluster.barrier()
    mbarrier.invalidate(bar)
    m = gl.arange(0, M, gl.SliceLayout(1, by_columns))
    n = gl.arange(0, N, gl.SliceLayout(0, by_columns))
    gl.store(target_ptr + m[:, None] * N + n[None, :], got)


@gluon.jit
def staged_sum(source_ptr, target_ptr, rows, N: gl.constexpr, STAGES: gl.constexpr):
    """Column sums through a ring filled by cp.async; an mbarrier says when a row has come."""
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = mbarrier.allocate_mbarrier(batch=STAGES)
    columns = gl.arange(0, N, lanes)
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    gl.barrier()
    for stage in gl.static_range(STAGES - 1):
        async_copy.async_load(ring.index(stage), source_ptr + stage * N + columns, mask=columns < N)
        async_copy.mbarrier_arrive(bars.index(stage))
        mbarrier.arrive(bars.index(stage))
    total = gl.zeros((N,), gl.float32, lanes)
    for row in range(rows):
        ahead = row + STAGES - 1
        if ahead < rows:
            async_copy.async_load(ring.index(ahead % STAGES), source_ptr + ahead * N + columns)
            async_copy.mbarrier_arrive(bars.index(ahead % STAGES))
            mbarrier.arrive(bars.index(ahead % STAGES))
        mbarrier.wait(bars.index(row % STAGES), (row // STAGES) & 1)
        total += ring.index(row % STAGES).load(lanes)
        gl.barrier()
    gl.store(target_ptr + columns, total)
