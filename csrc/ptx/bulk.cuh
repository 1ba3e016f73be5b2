// The async proxy: fences towards it, and groups of bulk copies that read shared memory. PTX ISA 9.7.9.25, 9.7.13.4.
#pragma once

namespace vsa::ptx {

// Generic writes of this thread to shared memory become visible to wgmma and to the copy engine, for whoever
// synchronises with this thread afterwards.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void commit_bulk_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void wait_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace vsa::ptx
