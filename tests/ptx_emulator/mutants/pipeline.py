"""A kernel of our own rules, for faults that compilers' kernels cannot show: tcgen05.fence, and tensor memory reused.

Triton emits no tcgen05.fence, so its kernels cannot be held to it. This one runs strict. `tiles` products
D[t] = A[t] B[t]^T, each [128, 32] x [64, 32]^T in f16 with f32 sums, go through two rings of two stages:

    loader (warp 5)    bulk copies into a stage of shared memory        full[s]  ->  <- empty[s]
    issuer (warp 4)    two products into a stage of tensor memory       done[s]  ->  <- free[s]
    epilogue (0..3)    reads its 32 lanes, hands the stage back, writes to global memory

A stage of tensor memory handed back before its reads are over is a fault that tests of results miss: on hardware they
stay right until very many tiles run. Shared memory has the layout without swizzle, [k / 8, row, k % 8]: PTX ISA
9.7.16.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..corpus.case import Case, Expected, Program

if TYPE_CHECKING:
    from ..launch import Device

TILES, M, N, K = 6, 128, 64, 32
A_BYTES, B_BYTES = M * K * 2, N * K * 2
STAGE = A_BYTES + B_BYTES
THREADS = 6 * 32
COLUMNS = 2 * N
BARRIERS = 2 * STAGE  # full, empty, done, free: two of 8 bytes each; then the address of the tensor memory
FULL, EMPTY, DONE, FREE, ADDRESS = (BARRIERS + 16 * k for k in range(5))
IDESC = 1 << 4 | N >> 3 << 17 | M >> 4 << 24  # f16 x f16 -> f32, K-major. PTX ISA 9.7.16.4.2


def _descriptor(rows: int) -> int:
    """Without the start address: leading offset rows * 16 (next 8 of K), stride offset 128 (next 8 rows)."""
    return rows << 16 | 128 >> 4 << 32 | 1 << 46


def _wait(label: str, barrier: str, parity: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p6, [{barrier}], {parity};\n@!%p6 bra {label};\n"


_HEAD = f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry pipeline(.param .u64 a, .param .u64 b, .param .u64 out, .param .u32 tiles) .reqntid {THREADS}
{{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b32 %v<64>; .reg .b64 %d<16>;
.shared .align 1024 .b8 smem[{ADDRESS + 16}];
ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; ld.param.u64 %d2, [out]; ld.param.u32 %r1, [tiles];
mov.u32 %r0, %tid.x;
mov.u32 %r2, smem;
shr.u32 %r3, %r0, 5;
and.b32 %r4, %r0, 31;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra initialised;
mbarrier.init.shared.b64 [%r2+{FULL}], 1;
mbarrier.init.shared.b64 [%r2+{FULL + 8}], 1;
mbarrier.init.shared.b64 [%r2+{EMPTY}], 1;
mbarrier.init.shared.b64 [%r2+{EMPTY + 8}], 1;
mbarrier.init.shared.b64 [%r2+{DONE}], 1;
mbarrier.init.shared.b64 [%r2+{DONE + 8}], 1;
mbarrier.init.shared.b64 [%r2+{FREE}], 128;
mbarrier.init.shared.b64 [%r2+{FREE + 8}], 128;
fence.mbarrier_init.release.cluster;
initialised:
bar.warp.sync -1;
setp.eq.u32 %p1, %r3, 0;
add.u32 %r5, %r2, {ADDRESS};
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], {COLUMNS};
@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r6, [%r5];
mov.u32 %r7, 0;
setp.eq.u32 %p2, %r3, 5;
@%p2 bra loader;
setp.eq.u32 %p2, %r3, 4;
@%p2 bra issuer;
"""

# %r7 tile, %r8 stage, %r9 parity of the tile, %r10 parity before it, %r11 the stage's barriers.
_STAGE = """
and.b32 %r8, %r7, 1;
bfe.u32 %r9, %r7, 1, 1;
xor.b32 %r10, %r9, 1;
shl.b32 %r11, %r8, 3;
add.u32 %r11, %r11, %r2;
"""


def _next(label: str) -> str:
    return f"add.u32 %r7, %r7, 1;\nsetp.lt.u32 %p3, %r7, %r1;\n@%p3 bra {label};\n"


_EPILOGUE = f"""
shl.b32 %r12, %r3, 21;
add.u32 %r12, %r12, %r6;
epilogue_tile:
{_STAGE}
{_wait("done_wait", f"%r11+{DONE}", "%r9")}
tcgen05.fence::after_thread_sync;
mad.lo.u32 %r13, %r8, {N}, %r12;
tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{", ".join(f"%v{n}" for n in range(N))}}}, [%r13];
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
mbarrier.arrive.shared.b64 _, [%r11+{FREE}];
mad.lo.u32 %r14, %r7, {M}, %r0;
mul.wide.u32 %d3, %r14, {N * 4};
add.u64 %d3, %d3, %d2;
{"".join(f"st.global.v4.b32 [%d3+{4 * n}], {{%v{n}, %v{n + 1}, %v{n + 2}, %v{n + 3}}};" for n in range(0, N, 4))}
{_next("epilogue_tile")}
bra end;
"""

_ISSUER = f"""
issuer:
setp.ne.u32 %p2, %r4, 0;
@%p2 bra end;
issuer_tile:
{_STAGE}
{_wait("full_wait", f"%r11+{FULL}", "%r9")}
{_wait("free_wait", f"%r11+{FREE}", "%r10")}
tcgen05.fence::after_thread_sync;
mad.lo.u32 %r13, %r8, {N}, %r6;
mad.lo.u32 %r14, %r8, {STAGE}, %r2;
shr.u32 %r15, %r14, 4;
cvt.u64.u32 %d3, %r15;
add.u64 %d4, %d3, {_descriptor(M)};
add.u64 %d5, %d3, {_descriptor(N) + (A_BYTES >> 4)};
mov.u32 %r16, {IDESC};
setp.ne.u32 %p4, %r16, %r16;
setp.eq.u32 %p5, %r16, %r16;
tcgen05.mma.cta_group::1.kind::f16 [%r13], %d4, %d5, %r16, %p4;
add.u64 %d4, %d4, {2 * M};
add.u64 %d5, %d5, {2 * N};
tcgen05.mma.cta_group::1.kind::f16 [%r13], %d4, %d5, %r16, %p5;
add.u32 %r17, %r11, {EMPTY};
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r17];
add.u32 %r17, %r11, {DONE};
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r17];
{_next("issuer_tile")}
bra end;
"""

_LOADER = f"""
loader:
setp.ne.u32 %p2, %r4, 0;
@%p2 bra end;
loader_tile:
{_STAGE}
{_wait("empty_wait", f"%r11+{EMPTY}", "%r10")}
mbarrier.arrive.expect_tx.shared.b64 _, [%r11+{FULL}], {STAGE};
mad.lo.u32 %r14, %r8, {STAGE}, %r2;
add.u32 %r15, %r14, {A_BYTES};
add.u32 %r16, %r11, {FULL};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r14], [%d0], {A_BYTES}, [%r16];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r15], [%d1], {B_BYTES}, [%r16];
add.u64 %d0, %d0, {A_BYTES};
add.u64 %d1, %d1, {B_BYTES};
{_next("loader_tile")}
"""

_END = f"""
end:
bar.warp.sync -1;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, {COLUMNS};
ret;
}}
"""

TEXT = _HEAD + _EPILOGUE + _ISSUER + _LOADER + _END


def _tiles(values: np.ndarray) -> np.ndarray:
    """[tiles, rows, K] in the order in which a stage of shared memory holds it."""
    tiles, rows, k = values.shape
    return values.reshape(tiles, rows, k // 8, 8).swapaxes(1, 2).astype(np.float16)


def _build(device: Device, rng: np.random.Generator) -> tuple[list[Any], list[Expected]]:
    a = rng.integers(-4, 5, (TILES, M, K)).astype(np.float64)
    b = rng.integers(-4, 5, (TILES, N, K)).astype(np.float64)
    out = device.empty((TILES, M, N), np.float32)
    expected = Expected("out", out, a @ b.swapaxes(1, 2), 0.0, lambda values: values.astype(np.float64))
    return [device.upload(_tiles(a)), device.upload(_tiles(b)), out, TILES], [expected]


def case() -> Case:
    program = Program(TEXT, "pipeline", (1, 1, 1), (THREADS, 1, 1), (1, 1, 1), 0, _build)
    return Case("own/tensor_memory_ring", "sm_100a", True, lambda: program)
