// Columns of tensor memory, and the fences around barriers that order what threads do with it. PTX
// ISA 9.7.16.6, 9.7.16.7.
//
// An address is lane << 16 | column: 128 lanes, 512 columns of 32 bits. Warp w of a block reaches the 32 lanes from
// 32 * (w % 4) on.
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace vsa::ptx {

constexpr uint32_t kTensorLanes = 128;
constexpr uint32_t kTensorColumns = 512;
constexpr uint32_t kTensorLanesOfWarp = 32;

__host__ __device__ constexpr uint32_t tensor_address(uint32_t base, uint32_t lane, uint32_t column) {
  return base + (lane << 16) + column;
}

// By one whole warp: the address of kColumns columns is written to `address` in shared memory. Waits while another
// block of the multiprocessor holds too many.
template <uint32_t kColumns>
__device__ __forceinline__ void allocate_tensor_memory(uint32_t& address) {
  static_assert(kColumns >= 32 && kColumns <= kTensorColumns && (kColumns & (kColumns - 1)) == 0,
                "powers of two from 32 to 512");
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(&address)),
               "n"(kColumns)
               : "memory");
}

// This block allocates no more: another one need not wait for it.
__device__ __forceinline__ void relinquish_tensor_memory() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// By one whole warp, after all accesses are known to be over: a block must not end without.
template <uint32_t kColumns>
__device__ __forceinline__ void free_tensor_memory(uint32_t address) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(kColumns) : "memory");
}

// Between this thread's accesses to tensor memory and the arrival that tells another thread of them.
__device__ __forceinline__ void fence_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }

// Between a wait for another thread and this thread's accesses to tensor memory.
__device__ __forceinline__ void fence_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

}  // namespace vsa::ptx
