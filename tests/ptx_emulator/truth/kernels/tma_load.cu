// cp.async.bulk.tensor loads of 1 to 5 dimensions: the box lands in shared memory, which is then dumped whole, with a
// guard behind the box. The barrier is told to expect all bytes of the box, wherever it lies.
#include "common.cuh"

namespace truth {

constexpr uint32_t kUntouched = 0xA5A5A5A5u;

struct Tile {
    int c[5];        // coordinates of the box, innermost first
    uint32_t bytes;  // what the barrier is told to expect
    uint32_t dump;   // bytes of shared memory shown
    uint32_t offset; // of the box in shared memory
};

template <int Rank>
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap *map, const Tile &t, uint32_t barrier) {
    if constexpr (Rank == 1)
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2}], [%3];" ::"r"(to),
                     "l"(map), "r"(t.c[0]), "r"(barrier)
                     : "memory");
    if constexpr (Rank == 2)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                     "l"(map), "r"(t.c[0]), "r"(t.c[1]), "r"(barrier)
                     : "memory");
    if constexpr (Rank == 3)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                     "l"(map), "r"(t.c[0]), "r"(t.c[1]), "r"(t.c[2]), "r"(barrier)
                     : "memory");
    if constexpr (Rank == 4)
        asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                     "l"(map), "r"(t.c[0]), "r"(t.c[1]), "r"(t.c[2]), "r"(t.c[3]), "r"(barrier)
                     : "memory");
    if constexpr (Rank == 5)
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
                     "l"(map), "r"(t.c[0]), "r"(t.c[1]), "r"(t.c[2]), "r"(t.c[3]), "r"(t.c[4]), "r"(barrier)
                     : "memory");
}

template <int Rank>
__device__ __forceinline__ void load_and_dump(const CUtensorMap *map, const Tile &tile, uint8_t *out) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = shared_address(&barrier_storage);
    fill_words(smem, kUntouched, tile.dump);
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
        barrier_init(barrier, 1);
        barrier_init_fence();
    }
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_expect(barrier, tile.bytes);
        load_tile<Rank>(shared_address(smem) + tile.offset, map, tile, barrier);
    }
    wait(barrier, 0);
    copy_words(out, smem, tile.dump);
}

}  // namespace truth

using truth::Tile;

extern "C" __global__ void load_1d(const __grid_constant__ CUtensorMap map, const Tile tile, uint8_t *out) {
    truth::load_and_dump<1>(&map, tile, out);
}

extern "C" __global__ void load_2d(const __grid_constant__ CUtensorMap map, const Tile tile, uint8_t *out) {
    truth::load_and_dump<2>(&map, tile, out);
}

extern "C" __global__ void load_3d(const __grid_constant__ CUtensorMap map, const Tile tile, uint8_t *out) {
    truth::load_and_dump<3>(&map, tile, out);
}

extern "C" __global__ void load_4d(const __grid_constant__ CUtensorMap map, const Tile tile, uint8_t *out) {
    truth::load_and_dump<4>(&map, tile, out);
}

extern "C" __global__ void load_5d(const __grid_constant__ CUtensorMap map, const Tile tile, uint8_t *out) {
    truth::load_and_dump<5>(&map, tile, out);
}

// A map in global memory (copied there by the kernel's caller) instead of a parameter, and a cache hint.
extern "C" __global__ void load_2d_map_in_global(const CUtensorMap *map, int c0, int c1, uint32_t bytes, uint8_t *out) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage);
    if (threadIdx.x == 0) {
        truth::barrier_init(barrier, 1);
        truth::barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t policy;
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1)
                     : "memory");
        truth::arrive_expect(barrier, bytes);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(truth::shared_address(smem)),
                     "l"(map), "r"(c0), "r"(c1), "r"(barrier), "l"(policy)
                     : "memory");
    }
    truth::wait(barrier, 0);
    truth::copy_words(out, smem, bytes);
}

// `count` boxes of consecutive rows stream through two stages, so that each barrier runs through several phases.
extern "C" __global__ void load_2d_ring(const __grid_constant__ CUtensorMap map, int rows, int count, uint32_t bytes,
                                        uint8_t *out) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t full[2];
    if (threadIdx.x < 2) truth::barrier_init(truth::shared_address(full + threadIdx.x), 1);
    truth::barrier_init_fence();
    __syncthreads();
    for (int i = 0; i < count + 1; ++i) {
        if (i < count && threadIdx.x == 0) {
            const uint32_t barrier = truth::shared_address(full + i % 2);
            truth::arrive_expect(barrier, bytes);
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                         "[%0], [%1, {%2, %3}], [%4];" ::"r"(truth::shared_address(smem + i % 2 * bytes)),
                         "l"(&map), "r"(0), "r"(i * rows), "r"(barrier)
                         : "memory");
        }
        if (i > 0) {
            truth::wait(truth::shared_address(full + (i - 1) % 2), (i - 1) / 2 % 2);
            truth::copy_words(out + (i - 1) * bytes, smem + (i - 1) % 2 * bytes, bytes);
            // The stage is read by generic loads and written next by the async proxy.
            truth::fence_async_shared();
        }
        __syncthreads();
    }
}
