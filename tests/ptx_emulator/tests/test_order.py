"""Happens-before: what is ordered passes, what is not is reported with both accesses, whatever order the warps took."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, Module, Options, Report, load
from ..compile import compile_cuda
from ..errors import BarrierError, DeadlockError, Finding, RaceError, TransactionError, UninitialisedError

pytestmark = pytest.mark.nvcc

SOURCE = r"""
#include <cstdint>
__device__ __forceinline__ uint32_t addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
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
// Warp 0 hands numbers to warp 1; `faults` leaves out one thing.
extern "C" __global__ void hand_over(int* out, int faults) {
  __shared__ int data[32];
  __shared__ uint64_t full[2], empty;
  int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) { init(full, 32); init(full + 1, 32); init(&empty, 32); }
  if (faults != 1) __syncthreads();
  for (int n = 0; n < 4; ++n) {
    if (threadIdx.x < 32) {
      if (n && !(faults == 2 && n == 3)) wait(&empty, (n - 1) & 1);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr(&data[lane])), "r"(n * 100 + lane) : "memory");
      if (faults != 3) arrive(full + n % 2);
    } else {
      if (faults != 4) wait(full + n % 2, (n / 2 + (faults == 5)) & 1);
      asm volatile("{.reg .u32 x; ld.shared.u32 x, [%0]; st.global.u32 [%1], x;}"
                   ::"r"(addr(&data[31 - lane])), "l"(out + n * 32 + lane) : "memory");
      arrive(&empty);
    }
  }
}
extern "C" __global__ void lanes(int* out, int sync) {
  __shared__ int data[32];
  if (threadIdx.x == 0) asm volatile("st.shared.u32 [%0], 7;" ::"r"(addr(&data[1])) : "memory");
  if (sync) __syncwarp();
  if (threadIdx.x == 1)
    asm volatile("{.reg .u32 x; ld.shared.u32 x, [%0]; st.global.u32 [%1], x;}" ::"r"(addr(&data[1])), "l"(out));
}
extern "C" __global__ void blocks(int* out, int stride) { out[blockIdx.x * stride] = blockIdx.x; }
extern "C" __global__ void flag(int* data, int* ready, int* out, int fenced) {
  if (blockIdx.x == 0) {
    data[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) { if (fenced) __threadfence(); atomicExch(ready, 1); }
  } else {
    if (threadIdx.x == 0) { while (atomicAdd(ready, 0) == 0) {} if (fenced) __threadfence(); }
    __syncthreads();
    out[threadIdx.x] = data[threadIdx.x];
  }
}
extern "C" __global__ void counts(uint64_t* out, int what) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) {
    init(&b, 1);
    if (what == 0) {
      arrive(&b);
      asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(addr(&b)));
    }
    if (what == 1) init(&b, 1);
    if (what == 2) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(addr(&b))); arrive(&b); }
    if (what == 3) out[0] = *(volatile uint64_t*)&b;
    if (what == 4) wait(&b, 0);
  }
}
extern "C" __global__ void many(float* out) { atomicAdd(out, 1.f); atomicAdd(out + 1 + threadIdx.x % 3, 2.f); }
extern "C" __global__ void bytes(unsigned char* out) {
  __shared__ unsigned char s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def module() -> Module:
    return load(compile_cuda(SOURCE))


def hand_over(module: Module, faults: int, **options: object) -> tuple[Report, np.ndarray]:
    device = Device()
    out = device.empty(128, np.int32)
    report = device.launch(module, kernel="hand_over", block=(64,), args=[out, faults], options=Options(**options))  # type: ignore[arg-type]
    return report, out.array


RIGHT = np.concatenate([n * 100 + np.arange(31, -1, -1) for n in range(4)])


@pytest.mark.parametrize("schedule", ["earliest", "latest", "random"])
@pytest.mark.parametrize("seed", range(3))
def test_a_ring_of_one_slot_is_clean_in_every_schedule(module: Module, schedule: str, seed: int) -> None:
    report, out = hand_over(module, 0, schedule=schedule, seed=seed)
    assert (out == RIGHT).all()
    assert not report.lints


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (1, BarrierError),  # the barriers are used before their initialisation is ordered
        (2, RaceError),  # a slot is written again before it was read
        (3, DeadlockError),  # nobody arrives
        (4, (RaceError, UninitialisedError)),  # a slot is read before it is written
        (5, (RaceError, UninitialisedError)),  # the phase before is waited for
    ],
)
@pytest.mark.parametrize("schedule", ["earliest", "random"])
def test_each_fault_is_found(module: Module, faults: int, error: type[Finding], schedule: str) -> None:
    with pytest.raises(error) as raised:
        hand_over(module, faults, schedule=schedule)
    assert "kernel.cu:" in str(raised.value)
    if raised.type is RaceError:
        for part in ("now:", "before:", "missing:", "warp 0", "warp 1", "shared memory"):
            assert part in str(raised.value)


def test_a_deadlock_names_every_waiting_warp(module: Module) -> None:
    with pytest.raises(DeadlockError) as raised:
        hand_over(module, 3)
    text = str(raised.value)
    assert "warp 1" in text and "mbarrier at" in text and "32 of 32 arrivals" in text and "seed=0" in text


def test_without_race_detection_only_the_numbers_tell(module: Module) -> None:
    _, out = hand_over(module, 2, race=False)
    assert out.shape == (128,)


def test_lanes_of_a_warp_are_threads(module: Module) -> None:
    device = Device()
    out = device.empty(1, np.int32)
    device.launch(module, kernel="lanes", args=[out, 1])
    assert out.array[0] == 7
    with pytest.raises(RaceError, match="bytes 0x4"):
        device.launch(module, kernel="lanes", args=[out, 0])


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
def test_blocks_that_write_one_place_race(module: Module, order: str) -> None:
    device = Device()
    out = device.empty(4, np.int32)
    device.launch(module, kernel="blocks", grid=(4,), block=(1,), args=[out, 1], options=Options(order=order))
    assert out.array.tolist() == [0, 1, 2, 3]
    with pytest.raises(RaceError, match="global memory"):
        device.launch(module, kernel="blocks", grid=(4,), block=(1,), args=[out, 0], options=Options(order=order))


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_a_flag_between_blocks_orders_with_fences_only(module: Module, order: str) -> None:
    def run(fenced: int) -> np.ndarray:
        device = Device()
        data, out = device.empty(32, np.int32), device.empty(32, np.int32)
        ready = device.upload(np.zeros(1, np.int32))
        args = [data, ready, out, fenced]
        device.launch(module, kernel="flag", grid=(2,), block=(32,), args=args, options=Options(order=order))
        return out.array

    assert run(1).tolist() == list(range(32))
    with pytest.raises(RaceError):
        run(0)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (0, TransactionError, "16 bytes announced"),
        (1, BarrierError, "while it lives"),
        (2, BarrierError, "invalidated"),
        (3, BarrierError, "live mbarrier"),
        (4, DeadlockError, "1 of 1 arrivals"),
    ],
)
def test_barrier_lifetimes_and_counts(module: Module, what: int, error: type[Finding], words: str) -> None:
    device = Device()
    with pytest.raises(error, match=words):
        device.launch(module, kernel="counts", args=[device.empty(1, np.uint64), what])


def test_atomics_do_not_race_with_each_other(module: Module) -> None:
    device = Device()
    out = device.upload(np.zeros(4, np.float32))
    device.launch(module, kernel="many", grid=(3,), block=(96,), args=[out])
    assert out.array.tolist() == [288, 192, 192, 192]


def test_bytes_of_one_word_are_places_of_their_own(module: Module) -> None:
    device = Device()
    out = device.empty(64, np.uint8)
    device.launch(module, kernel="bytes", block=(64,), args=[out])
    assert out.array.tolist() == list(range(63, -1, -1))


def test_collected_findings_do_not_stop_the_run(module: Module) -> None:
    report, _ = hand_over(module, 2, collect=True)
    assert {f.kind for f in report.findings} == {"race", "barrier"}  # the data, and the phases of the mbarriers


def test_a_random_run_is_repeated_by_its_seed(module: Module) -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(Finding) as raised:
            hand_over(module, 2, schedule="random", seed=5)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_global_float_atomics_flush_subnormals_and_shared_ones_do_not() -> None:
    source = r"""
    extern "C" __global__ void k(float* out, float tiny) {
      __shared__ float s;
      s = tiny;
      atomicAdd(&s, tiny);
      out[1] = s;
      atomicAdd(out, tiny);
    }"""
    device = Device()
    out = device.upload(np.zeros(2, np.float32))
    device.launch(load(compile_cuda(source)), block=(1,), args=[out, 1e-40])
    assert out.array[0] == 0 and out.array[1] == 2 * np.float32(1e-40)


LAST_BLOCK = r"""
__device__ unsigned int arrived;
extern "C" __global__ void sums(int* parts, int* out, int blocks) {
  __shared__ int last;
  parts[blockIdx.x * 64 + threadIdx.x] = blockIdx.x + threadIdx.x;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(&arrived, blocks - 1) == blocks - 1;
  __syncthreads();
  if (last) {
    __threadfence();
    int sum = 0;
    for (int b = 0; b < blocks; ++b) sum += parts[b * 64 + threadIdx.x];
    out[threadIdx.x] = sum;
  }
}"""


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_all_fence_and_one_signals(order: str) -> None:
    """Code that runs everywhere; by the letter a fence between barrier and atomic lacks: an error if strict."""

    def run(strict: bool) -> np.ndarray:
        device = Device()
        parts, out = device.empty(256, np.int32), device.empty(64, np.int32)
        options = Options(order=order, strict=strict)
        module = load(compile_cuda(LAST_BLOCK))
        device.launch(module, grid=(4,), block=(64,), args=[parts, out, 4], options=options)
        return out.array

    assert (run(False) == 6 + 4 * np.arange(64)).all()
    with pytest.raises(RaceError):
        run(True)
