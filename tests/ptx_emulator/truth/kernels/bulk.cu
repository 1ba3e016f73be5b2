// Bulk copies without a tensor map: global to shared on a barrier, shared to global and reductions in bulk groups.
#include "common.cuh"

// In and back out, at any 16-byte offset; the second half of the copy is a group of its own and waited for last.
extern "C" __global__ void bulk_copy(const uint8_t *in, uint8_t *out, uint32_t bytes, uint32_t shared_offset,
                                     uint32_t in_offset) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage);
    const uint32_t tile = truth::shared_address(smem + shared_offset);
    if (threadIdx.x == 0) {
        truth::barrier_init(barrier, 1);
        truth::barrier_init_fence();
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(in), "r"(bytes) : "memory");
        truth::arrive_expect(barrier, bytes);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         tile),
                     "l"(in + in_offset), "r"(bytes), "r"(barrier)
                     : "memory");
        truth::wait(barrier, 0);
        const uint32_t half = bytes / 32 * 16;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(tile), "r"(half)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + half), "r"(tile + half),
                     "r"(bytes - half)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// Every CTA of the grid reduces its own block of `in` into the same `out`.
#define BULK_REDUCE(name, operation)                                                                              \
    extern "C" __global__ void name(const uint8_t *in, uint8_t *out, uint32_t bytes) {                           \
        extern __shared__ __align__(128) uint8_t smem[];                                                         \
        truth::copy_words(smem, in + blockIdx.x * bytes, bytes);                                                  \
        truth::fence_async_shared();                                                                              \
        __syncthreads();                                                                                          \
        if (threadIdx.x == 0) {                                                                                   \
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." operation " [%0], [%1], %2;" ::"l"( \
                             out),                                                                                \
                         "r"(truth::shared_address(smem)), "r"(bytes)                                             \
                         : "memory");                                                                             \
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");                                             \
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");                                             \
        }                                                                                                         \
    }

BULK_REDUCE(bulk_add_f32, "add.f32")
BULK_REDUCE(bulk_add_f64, "add.f64")
BULK_REDUCE(bulk_add_f16, "add.noftz.f16")
BULK_REDUCE(bulk_add_bf16, "add.noftz.bf16")
BULK_REDUCE(bulk_max_bf16, "max.bf16")
BULK_REDUCE(bulk_min_f16, "min.f16")
BULK_REDUCE(bulk_add_u32, "add.u32")
BULK_REDUCE(bulk_add_s32, "add.s32")
BULK_REDUCE(bulk_add_u64, "add.u64")
BULK_REDUCE(bulk_min_u32, "min.u32")
BULK_REDUCE(bulk_min_s32, "min.s32")
BULK_REDUCE(bulk_max_s64, "max.s64")
BULK_REDUCE(bulk_inc_u32, "inc.u32")
BULK_REDUCE(bulk_dec_u32, "dec.u32")
BULK_REDUCE(bulk_and_b32, "and.b32")
BULK_REDUCE(bulk_or_b32, "or.b32")
BULK_REDUCE(bulk_xor_b64, "xor.b64")
