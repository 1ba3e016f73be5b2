// The sixteen hardware barriers of a block. Barrier 0 is __syncthreads. PTX ISA 9.7.13.1.
#pragma once

#include <cstdint>

namespace vsa::ptx {

// kThreads: those that arrive and those that sync, together; whole warps.
template <int kThreads>
__device__ __forceinline__ void sync_named(uint32_t id) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void arrive_named(uint32_t id) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace vsa::ptx
