// Runs of bytes from shared memory added to global memory by the copy engine. PTX ISA 9.7.9.25.4.
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace vsa::ptx {

// target[i] += source[i], each element atomically, in no order. Both 16-byte aligned, `bytes` a multiple of 16. Belongs
// to the bulk group that this thread commits next (bulk.cuh).
__device__ __forceinline__ void reduce_add(float* target, const float* source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

}  // namespace vsa::ptx
