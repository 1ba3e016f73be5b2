"""Hostile inputs: correct code that looks wrong, faults that look right, and text that is no PTX."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, Module, Options, Report, load
from ..compile import compile_cuda
from ..errors import (
    AlignmentError,
    BoundsError,
    BudgetError,
    EmulatorError,
    LaunchError,
    LoadError,
    PtxSyntaxError,
    RaceError,
    UnknownInstructions,
)

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"

SOURCE = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/barrier>
#include <cstdint>
namespace cg = cooperative_groups;
#define CLUSTER asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory")
__device__ __forceinline__ uint32_t addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ int lds(const int* p) {
  int v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr(p)) : "memory"); return v;
}
__device__ __forceinline__ void sts(int* p, int v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr(p)), "r"(v) : "memory");
}
__device__ __forceinline__ void init(uint64_t* b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(addr(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(addr(b)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* b, int parity) {
  asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}"
               ::"r"(addr(b)), "r"(parity) : "memory");
}
// Correct ----------------------------------------------------------------------------------------------------------
extern "C" __global__ void warps_leave(int* out) {
  __shared__ int s[64];
  if (threadIdx.x >= 64) return;
  s[threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void lanes_leave(int* out) {
  __shared__ int s[64];
  sts(s + threadIdx.x, threadIdx.x);
  if (threadIdx.x % 32 >= 16) return;
  __syncthreads(); out[threadIdx.x] = lds(s + (threadIdx.x ^ 32));
  __syncthreads(); sts(s + threadIdx.x, 1); __syncthreads(); out[threadIdx.x] += lds(s + (threadIdx.x ^ 32));
}
extern "C" __global__ void partial_warp(int* out) {
  __shared__ int s[48]; __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 48);
  __syncthreads();
  sts(s + threadIdx.x, threadIdx.x); arrive(&b); wait(&b, 0); out[threadIdx.x] = lds(s + 47 - threadIdx.x);
}
extern "C" __global__ void split_arrivals(int* out) {
  __shared__ int s[32]; __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    sts(s + threadIdx.x, threadIdx.x);
    if (threadIdx.x & 1) arrive(&b); else { asm volatile("nanosleep.u32 10;"); arrive(&b); }
  } else { wait(&b, 0); out[threadIdx.x - 32] = lds(s + threadIdx.x - 32); }
}
extern "C" __global__ void leader_arrives(int* out, int who) {  // its own number is ordered, the others' are not
  __shared__ int s[32]; __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 1);
  __syncthreads();
  if (threadIdx.x < 32) { sts(s + threadIdx.x, threadIdx.x); if (threadIdx.x == 3) arrive(&b); }
  else { wait(&b, 0); if (threadIdx.x == 32) out[0] = lds(s + who); }
}
extern "C" __global__ void subset(int* out, int with) {  // lanes 0..7 synchronise among themselves
  __shared__ int s[32]; int t = threadIdx.x;
  sts(s + t, t);
  if (t < 8) { __syncwarp(0xff); out[t] = lds(s + (with ? 7 - t : 15 - t)); }
}
extern "C" __global__ void spin_lock(int* lock, int* out) {
  while (atomicCAS(lock, 0, 1) != 0) {}
  __threadfence();
  int v = *(volatile int*)out; *(volatile int*)out = v + 1;
  __threadfence();
  atomicExch(lock, 0);
}
extern "C" __global__ void tiles(int* out) {
  auto t = cg::tiled_partition<8>(cg::this_thread_block());
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  t.sync();
  out[threadIdx.x] = s[(threadIdx.x & ~7) + 7 - t.thread_rank()] + cg::reduce(t, (int)threadIdx.x, cg::plus<int>());
}
extern "C" __global__ void votes(unsigned* out) {  // two groups meet at one instruction, each with its mask
  unsigned m = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  out[threadIdx.x] = __ballot_sync(m, threadIdx.x % 3 == 0) + __match_any_sync(m, threadIdx.x % 2);
}
extern "C" __global__ void cuda_barrier(int* out) {
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::barrier<cuda::thread_scope_block> b; __shared__ int s[80];
  if (threadIdx.x == 0) init(&b, blockDim.x);
  __syncthreads();
  for (int i = 0; i < 3; ++i) {
    s[threadIdx.x] = threadIdx.x + i; b.arrive_and_wait(); out[threadIdx.x] = s[79 - threadIdx.x]; b.arrive_and_wait();
  }
}
// Wrong ------------------------------------------------------------------------------------------------------------
extern "C" __global__ void lanes_collide(int* g) { __shared__ int s[16]; sts(s + threadIdx.x / 2, threadIdx.x); }
extern "C" __global__ void lane_reads_lane_writes(int* g, int sync) {
  __shared__ int s[2];
  if (threadIdx.x == 0) sts(s, 1);
  __syncwarp();
  if (threadIdx.x == 1) g[0] = lds(s);
  if (sync) __syncwarp();
  if (threadIdx.x == 2) sts(s, 2);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) peer_ends(int* out, int waits) {
  __shared__ int s[32]; unsigned r; uint32_t a; int v;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  sts(s + threadIdx.x, threadIdx.x + 100 * r);
  CLUSTER;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(addr(s + threadIdx.x)), "r"(r ^ 1));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  out[r * 32 + threadIdx.x] = v;
  if (waits) CLUSTER;
}
"""


@pytest.fixture(scope="module")
def module() -> Module:
    return load(compile_cuda(SOURCE))


def run(module: Module, name: str, n: int, *more: int, block: int = 32, grid: int = 1, **options: object) -> np.ndarray:
    device = Device(1 << 20)
    out = device.upload(np.zeros(n, np.int32))
    chosen = Options(**{"max_instructions": 200_000, **options})  # type: ignore[arg-type]
    device.launch(module, kernel=name, grid=(grid,), block=(block,), args=[out, *more], options=chosen)
    return out.array


SCHEDULES = pytest.mark.parametrize("schedule", ["earliest", "latest", "random"])
T = np.arange(64)


@pytest.mark.nvcc
@SCHEDULES
@pytest.mark.parametrize(
    ("name", "block", "expected"),
    [
        ("warps_leave", 128, 63 - T),
        ("lanes_leave", 64, np.where(T % 32 < 16, (T ^ 32) + 1, 0)),
        ("partial_warp", 48, 47 - T[:48]),
        ("split_arrivals", 64, T[:32]),
        ("tiles", 64, (T & ~7) + 7 - T % 8 + (T // 8) * 64 + 28),
        ("cuda_barrier", 80, 81 - np.arange(80)),
    ],
)
def test_correct_code_is_clean(module: Module, name: str, block: int, expected: np.ndarray, schedule: str) -> None:
    assert run(module, name, len(expected), block=block, schedule=schedule, seed=1).tolist() == expected.tolist()


@pytest.mark.nvcc
def test_groups_with_member_masks_of_their_own(module: Module) -> None:
    lanes = np.arange(32)
    group = [0xFFFF if lane < 16 else 0xFFFF0000 for lane in lanes]
    ballot = [sum(1 << k for k in lanes.tolist() if g >> k & 1 and k % 3 == 0) for g in group]
    match = [
        sum(1 << k for k in lanes.tolist() if g >> k & 1 and k % 2 == n % 2) for n, g in zip(lanes, group, strict=True)
    ]
    expected = np.array(ballot, np.uint64) + np.array(match, np.uint64)
    assert run(module, "votes", 32).view(np.uint32).tolist() == expected.astype(np.uint32).tolist()


@pytest.mark.nvcc
def test_a_lane_that_arrives_alone_releases_what_it_did(module: Module) -> None:
    assert run(module, "leader_arrives", 1, 3, block=64)[0] == 3
    with pytest.raises(RaceError, match="warp 1"):
        run(module, "leader_arrives", 1, 4, block=64)


@pytest.mark.nvcc
def test_a_part_of_a_warp_synchronises(module: Module) -> None:
    assert run(module, "subset", 8, 1).tolist() == list(range(7, -1, -1))
    with pytest.raises(RaceError):
        run(module, "subset", 8, 0)


@pytest.mark.nvcc
def test_lanes_that_wait_for_each_other_make_progress(module: Module) -> None:
    device = Device(1 << 20)
    lock, out = device.upload(np.zeros(1, np.int32)), device.upload(np.zeros(1, np.int32))
    options = Options(max_instructions=200_000)
    device.launch(module, kernel="spin_lock", grid=(2,), block=(64,), args=[lock, out], options=options)
    assert out.array[0] == 128


@pytest.mark.nvcc
def test_lanes_that_store_different_values_to_one_place(module: Module) -> None:
    with pytest.raises(RaceError, match=r"(?s)lanes 0 and 1 of warp 0.*line \d+"):
        run(module, "lanes_collide", 1)


@pytest.mark.nvcc
def test_a_lane_overwrites_what_another_reads(module: Module) -> None:
    assert run(module, "lane_reads_lane_writes", 1, 1)[0] == 1
    with pytest.raises(RaceError, match="a read by warp 0"):
        run(module, "lane_reads_lane_writes", 1, 0)


@pytest.mark.nvcc
@SCHEDULES
def test_shared_memory_ends_with_its_block(module: Module, schedule: str) -> None:
    run(module, "peer_ends", 64, 1, grid=2, schedule=schedule)
    with pytest.raises((RaceError, BoundsError), match=r"barrier\.cluster"):
        run(module, "peer_ends", 64, 0, grid=2, schedule=schedule)


def kernel(body: str) -> str:
    declared = ".reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<8>; .shared .align 16 .b8 smem[256];"
    return f"{HEADER}.visible .entry k(.param .u64 o) {{ {declared}\n{body}\nret; }}\n"


def launch(text: str, **options: object) -> Report:
    device = Device(1 << 20)
    return device.launch(load(text), args=[device.upload(np.zeros(64, np.int32))], options=Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("race", [True, False])
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("st.shared.u32 [smem+-4], %r0;", BoundsError),
        ("mov.u32 %r1, smem; st.shared.u8 [%r1+-1], %r0;", BoundsError),
        ("mov.u32 %r1, smem; atom.shared.add.u32 %r2, [%r1+-4], 1;", BoundsError),
        ("atom.shared.add.u32 %r2, [smem+256], 1;", BoundsError),
        ("mov.b64 %d1, 0; st.shared.v4.u32 [smem+256], {%r0,%r0,%r0,%r0};", BoundsError),
        ("mbarrier.init.shared.b64 [smem+256], 1;", BoundsError),
        ("mov.u32 %r1, smem; mbarrier.init.shared.b64 [%r1+-8], 1;", BoundsError),
        ("ld.shared.u32 %r1, [smem+2];", AlignmentError),
        ("mov.u32 %r1, 3; T: .branchtargets A, B; brx.idx %r1, T; A: B:", BoundsError),
    ],
)
def test_addresses_out_of_range_name_their_line(body: str, error: type[EmulatorError], race: bool) -> None:
    with pytest.raises(error, match=r"line \d+"):
        launch(kernel(body), race=race)


@pytest.mark.parametrize(
    "body",
    [
        "ld.param.u32 %r1, [o+8];",
        "ld.param.u32 %r1, [o+-4];",
        "ld.shared.v4.u32 {%r1,%r2}, [smem];",
        "st.shared.u32 [smem], {%r1,%r2};",
        "bra 5;",
        "bra;",
        "brx.idx %r1, L; L:",
        "atom.shared.add.u32 %r1;",
        "mov.u32 %r1, %nosuch;",
        "bar.red.popc.u32 %r1;",
    ],
)
def test_operands_that_make_no_sense_are_refused_at_load(body: str) -> None:
    with pytest.raises(UnknownInstructions, match=r"line \d+"):
        load(kernel(body))


@pytest.mark.parametrize(
    "text",
    [
        ".version",
        ".file 1",
        '.file x "a"',
        f"{HEADER}.visible .entry k(.param .foo x) {{ ret; }}",
        f"{HEADER}.global .foo x;",
        f"{HEADER}.global .b8 x[-1];",
        f"{HEADER}.global .b8 x[3] = {{1, 2, 3, 4}};",
        f"{HEADER}.entry k() {{ ret; }} .entry k() {{ ret; }}",
        f"{HEADER}.entry k() {{ L: L: ret; }}",
        f"{HEADER}.entry k() {{ @ret; }}",
        f"{HEADER}.entry k() {{ .reg .b32 r; @r ret; }}",
        f"{HEADER}.entry k() {{ .loc x y z; ret; }}",
        f"{HEADER}.entry k() {{ .reg .b32 %r<99999999>; ret; }}",
        f"{HEADER}.entry k() {{ .local .b8 a[99999999999]; ret; }}",
        f"{HEADER}.func f(.param .b32 x) {{ ret; }} .entry k() {{ call f; ret; }}",
        f"{HEADER}.entry k() {{ .reg .pred p; .reg .b32 a; setp.eq.u32 p|, a, a; ret; }}",
    ],
)
def test_text_that_is_no_ptx_names_its_line(text: str) -> None:
    with pytest.raises(PtxSyntaxError, match=r"line \d+"):
        load(text)


def test_an_unknown_name_in_an_initial_value() -> None:
    with pytest.raises(LoadError, match="'y'"):
        load(f"{HEADER}.global .b64 x = y;")


@pytest.mark.parametrize(
    "shape",
    [
        {"grid": ("a",)},
        {"grid": None},
        {"grid": (1 << 40,)},
        {"grid": (1, 70000)},
        {"grid": (1 << 30,)},
        {"grid": (1.5,)},
        {"block": (1, 1, 65)},
        {"block": ("x",)},
        {"shared": -1},
        {"shared": 1.5},
        {"args": None},
        {"args": 5},
        {"options": {"race": True}},
        {"cluster": "x"},
    ],
)
def test_launches_that_make_no_sense(shape: dict) -> None:
    module = load(kernel(""))
    device = Device(1 << 20)
    with pytest.raises(LaunchError):
        device.launch(module, **{"args": [device.empty(4, "f4")], **shape})


@pytest.mark.parametrize("option", [{"resident": 0}, {"max_instructions": 0}, {"seed": -1}, {"severity": None}])
def test_options_that_make_no_sense(option: dict) -> None:
    with pytest.raises(LaunchError, match=next(iter(option))):
        Options(**option)


def test_shapes_and_dtypes_that_make_no_sense() -> None:
    device = Device(1 << 20)
    for shape, dtype in ((-1, "f4"), ((2, -3), "f4"), (2.5, "f4"), (3, "nosuch"), (3, object)):
        with pytest.raises(LaunchError):
            device.empty(shape, dtype)  # type: ignore[arg-type]
    with pytest.raises(LaunchError):
        device.upload(np.array([object()]))
    assert launch(kernel("")).instructions == 1


def test_modules_have_variables_of_their_own_after_others_are_gone() -> None:
    """A new module may lie where a collected one lay."""
    device = Device(1 << 20)
    for n in range(8):
        text = f"{HEADER}.global .align 4 .u32 g = {n};\n.entry k(.param .u64 o) {{ .reg .b32 r; .reg .b64 d; "
        text += "ld.param.u64 d, [o]; ld.global.u32 r, [g]; st.global.u32 [d], r; ret; }"
        out = device.empty(1, np.uint32)
        device.launch(load(text), block=(1,), args=[out])
        assert out.array[0] == n


def test_a_failure_of_python_gets_its_line() -> None:
    with pytest.raises(EmulatorError, match=r"line \d+"):
        launch(kernel("add.s32 %p1, %r1, %r2;"))


def test_a_loop_without_end_is_stopped() -> None:
    with pytest.raises(BudgetError, match=r"line \d+"):
        launch(kernel("L: bra L;"), max_instructions=1000)


@pytest.mark.nvcc
def test_lanes_that_count_long_do_not_let_others_run_into_an_aligned_barrier() -> None:
    source = r"""
extern "C" __global__ void count(int* out) {
  if (threadIdx.x < 5) for (int n = 0; n < 200 + (int)threadIdx.x; ++n) atomicAdd(out, 1);
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}"""
    assert run(load(compile_cuda(source)), "count", 1, block=64)[0] == 1010
