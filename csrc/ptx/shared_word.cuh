// A word in shared memory that one thread writes and others look at. PTX ISA 8.7.
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace vsa::ptx {

__device__ __forceinline__ void store_release(uint32_t& word, uint32_t value) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t& word) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(&word)) : "memory");
  return value;
}

}  // namespace vsa::ptx
