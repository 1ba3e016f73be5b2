// What L2 should keep: policies, and bulk reductions under one. PTX ISA 9.7.9.18, 9.7.9.25.4.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "shared_address.cuh"

namespace vsa::ptx {

// Keeps `fraction` of the lines longest, 0 < fraction <= 1; for 0 the policy that accesses have without one.
__device__ __forceinline__ uint64_t evict_last_policy(float fraction) {
  uint64_t policy;
  if (fraction > 0) {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, %1;" : "=l"(policy) : "f"(fraction));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// As reduce_add in bulk_reduce.cuh.
__device__ __forceinline__ void reduce_add(float* target, const float* source, uint64_t policy, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(target),
      "r"(shared_address(source)), "r"(bytes), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void reduce_add(__half* target, const __half* source, uint64_t policy, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.noftz.f16 [%0], [%1], %2, %3;" ::"l"(
          target),
      "r"(shared_address(source)), "r"(bytes), "l"(policy)
      : "memory");
}

}  // namespace vsa::ptx
