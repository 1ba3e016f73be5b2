// mbarrier objects in shared memory: phases, arrivals, announced bytes. PTX ISA 9.7.13.15.
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace vsa::ptx {

// One barrier. A phase completes when the arrivals it was initialised for have come and the bytes announced to it have
// landed; phases alternate between parity 0 and 1, the first one having parity 0.
struct Barrier {
  uint64_t opaque;
};

__device__ __forceinline__ void init_barrier(Barrier& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy, by the thread that initialised them.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void arrive(Barrier& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}

// One arrival for a converged warp, after whatever its lanes did before. The lane is chosen by a predicate and not by a
// branch: ptxas may take what follows a branch for divergent, and then moves every matrix descriptor of the code that
// follows to uniform registers one by one.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "@p mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(shared_address(&barrier))
      : "memory");
}

// One arrival that also announces `bytes` which copies will signal.
__device__ __forceinline__ void arrive_expect_bytes(Barrier& barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool try_wait(Barrier& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for the phase of this parity. Of a fresh barrier the phase of parity 1 counts as complete.
__device__ __forceinline__ void wait(Barrier& barrier, uint32_t parity) {
  while (!try_wait(barrier, parity)) {
  }
}

// A place in a ring of kStages buffers, and the parity of the phase that its barriers are in.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace vsa::ptx
