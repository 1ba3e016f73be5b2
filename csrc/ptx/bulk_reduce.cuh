// Runs of bytes between global and shared memory by the copy engine: copies and reductions. PTX ISA 9.7.9.25.4.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace vsa::ptx {

// target[i] += source[i], each element atomically, in no order. Both 16-byte aligned, `bytes` a multiple of 16. Belongs
// to the bulk group that this thread commits next (bulk.cuh).
__device__ __forceinline__ void reduce_add(float* target, const float* source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

// Copies `bytes` from global memory to `target`; `barrier` is told the bytes. Alignments as above.
__device__ __forceinline__ void load_bytes(void* target, const void* source, uint32_t bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(source), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

}  // namespace vsa::ptx
