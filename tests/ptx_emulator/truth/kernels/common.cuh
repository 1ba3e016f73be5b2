// Helpers shared by the kernels of this folder. A kernel takes pointers, integers and tensor maps only; every buffer
// it writes has been given an initial content, so that bytes left alone are compared as well.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace truth {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool test_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n\t"
                 ".reg .pred done;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t"
                 "}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n\t"
                 ".reg .pred done;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Waits for what threads of the other CTA of a cluster released.
__device__ __forceinline__ void wait_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n\t"
                 ".reg .pred done;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Generic writes to shared memory become visible to the async proxy; each writing thread issues it.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void copy_words(void *to, const void *from, uint32_t bytes) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        static_cast<uint32_t *>(to)[i] = static_cast<const uint32_t *>(from)[i];
}

__device__ __forceinline__ void fill_words(void *to, uint32_t value, uint32_t bytes) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) static_cast<uint32_t *>(to)[i] = value;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of the same variable in the CTA of that rank.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank) {
    uint32_t peer;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
    return peer;
}

}  // namespace truth
