// A lock in shared memory, taken and given back by whole warps. PTX ISA 9.7.13.
#pragma once

#include <cstdint>

#include "shared_address.cuh"
#include "warp.cuh"

namespace vsa::ptx {

// Lane 0 tries; predicates and a shuffle instead of branches, so that ptxas does not take the code for divergent.
__device__ __forceinline__ bool try_lock(uint32_t& word) {
  uint32_t before;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 lane;\n"
      "mov.u32 lane, %%laneid;\n"
      "setp.eq.u32 p, lane, 0;\n"
      "mov.b32 %0, 1;\n"
      "@p atom.relaxed.cta.shared::cta.cas.b32 %0, [%1], 0, 1;\n"
      "}"
      : "=r"(before)
      : "r"(shared_address(&word))
      : "memory");
  return __shfl_sync(kWholeWarp, before, 0) == 0;
}

__device__ __forceinline__ void unlock(uint32_t& word) {
  __syncwarp();
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 lane;\n"
      "mov.u32 lane, %%laneid;\n"
      "setp.eq.u32 p, lane, 0;\n"
      "@p st.relaxed.cta.shared::cta.b32 [%0], 0;\n"
      "}" ::"r"(shared_address(&word))
      : "memory");
}

}  // namespace vsa::ptx
