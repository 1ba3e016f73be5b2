// cp.async.bulk.tensor stores and cp.reduce.async.bulk.tensor: a byte image of a box goes through shared memory into a
// tensor; what lies outside the tensor is dropped.
#include "common.cuh"

namespace truth {

struct Box {
    int c[5];        // coordinates, innermost first
    uint32_t bytes;  // of the image
};

// `issue(shared address)` starts the bulk operation; it is committed and waited for by the same thread.
template <class Issue>
__device__ __forceinline__ void through_shared(const uint8_t *image, uint32_t bytes, Issue issue) {
    extern __shared__ __align__(1024) uint8_t smem[];
    copy_words(smem, image, bytes);
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        issue(shared_address(smem));
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

}  // namespace truth

using truth::Box;

extern "C" __global__ void store_1d(const __grid_constant__ CUtensorMap map, const Box box, const uint8_t *image) {
    truth::through_shared(image, box.bytes, [&](uint32_t from) {
        asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];" ::"l"(&map),
                     "r"(box.c[0]), "r"(from)
                     : "memory");
    });
}

extern "C" __global__ void store_2d(const __grid_constant__ CUtensorMap map, const Box box, const uint8_t *image) {
    truth::through_shared(image, box.bytes, [&](uint32_t from) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                     "r"(box.c[0]), "r"(box.c[1]), "r"(from)
                     : "memory");
    });
}

extern "C" __global__ void store_3d(const __grid_constant__ CUtensorMap map, const Box box, const uint8_t *image) {
    truth::through_shared(image, box.bytes, [&](uint32_t from) {
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                     "r"(box.c[0]), "r"(box.c[1]), "r"(box.c[2]), "r"(from)
                     : "memory");
    });
}

extern "C" __global__ void store_4d(const __grid_constant__ CUtensorMap map, const Box box, const uint8_t *image) {
    truth::through_shared(image, box.bytes, [&](uint32_t from) {
        asm volatile(
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
            "r"(box.c[0]), "r"(box.c[1]), "r"(box.c[2]), "r"(box.c[3]), "r"(from)
            : "memory");
    });
}

extern "C" __global__ void store_5d(const __grid_constant__ CUtensorMap map, const Box box, const uint8_t *image) {
    truth::through_shared(image, box.bytes, [&](uint32_t from) {
        asm volatile(
            "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
            "r"(box.c[0]), "r"(box.c[1]), "r"(box.c[2]), "r"(box.c[3]), "r"(box.c[4]), "r"(from)
            : "memory");
    });
}

// Every CTA of the grid reduces the same image into the same box.
#define REDUCE_2D(name, operation)                                                                                   \
    extern "C" __global__ void name(const __grid_constant__ CUtensorMap map, const Box box, const uint8_t *image) {  \
        truth::through_shared(image, box.bytes, [&](uint32_t from) {                                                 \
            asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." operation ".tile.bulk_group "          \
                         "[%0, {%1, %2}], [%3];" ::"l"(&map),                                                        \
                         "r"(box.c[0]), "r"(box.c[1]), "r"(from)                                                     \
                         : "memory");                                                                                \
        });                                                                                                          \
    }

REDUCE_2D(reduce_add_2d, "add")
REDUCE_2D(reduce_min_2d, "min")
REDUCE_2D(reduce_max_2d, "max")
REDUCE_2D(reduce_inc_2d, "inc")
REDUCE_2D(reduce_dec_2d, "dec")
REDUCE_2D(reduce_and_2d, "and")
REDUCE_2D(reduce_or_2d, "or")
REDUCE_2D(reduce_xor_2d, "xor")
