// A warp-specialised matrix product as our kernels are built: D [M, N] = A [M, K] B [N, K]^T in bf16.
//
// Block: 64 x 64 of D, K in steps of 64, kStages stages of 128B-swizzled tiles.
//   warpgroup 0, warp 0   Producer: waits empty[s], expects bytes on full[s], issues the loads
//   warpgroup 1           Consumer: waits full[s], wgmma, releases empty[s] of the step before; stmatrix, store by TMA
// With a cluster of two along M both CTAs need the same tile of B: each loads half of its rows and multicasts it, and
// a consumer frees a stage in both CTAs.
#include "wgmma.cuh"

namespace truth {

constexpr int kTile = 64;                  // rows of A, rows of B and K of a stage: 64 bf16 fill a 128-byte row
constexpr int kTileBytes = kTile * 128;    // one operand of one stage
constexpr int kStages = 2;                 // fewer than K steps, so that every barrier changes phase
constexpr int kProducerRegisters = 40;     // setmaxnreg: multiples of 8
constexpr int kConsumerRegisters = 232;

struct Storage {
    uint8_t sA[kStages][kTileBytes];
    uint8_t sB[kStages][kTileBytes];
    uint8_t sD[kTileBytes];
    uint64_t full[kStages], empty[kStages];
};

__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap *map, int column, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void load_tile_both(uint32_t to, const CUtensorMap *map, int column, int row,
                                               uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3))
                 : "memory");
}

__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("{\n\t"
                 ".reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n\t"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b, uint32_t scale) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LIST32 "}, %32, %33, p, 1, 1, 0, 0;\n\t}"
                 : REGS32("+f", 0)
                 : "l"(a), "l"(b), "r"(scale));
}

template <bool Cluster>
__device__ __forceinline__ void produce(Storage &s, const CUtensorMap *a, const CUtensorMap *b, int steps) {
    const uint32_t rank = Cluster ? cluster_rank() : 0;
    for (int k = 0; k < steps; ++k) {
        const int stage = k % kStages;
        const uint32_t full = shared_address(&s.full[stage]);
        if (k >= kStages) {
            const uint32_t empty = shared_address(&s.empty[stage]), parity = (k / kStages - 1) % 2;
            if constexpr (Cluster)
                wait_cluster(empty, parity);
            else
                wait(empty, parity);
        }
        arrive_expect(full, 2 * kTileBytes);
        load_tile(shared_address(s.sA[stage]), a, k * kTile, blockIdx.x * kTile, full);
        if constexpr (Cluster) {
            const int half = kTile / 2;
            load_tile_both(shared_address(s.sB[stage]) + rank * (kTileBytes / 2), b, k * kTile,
                           blockIdx.y * kTile + rank * half, full);
        } else {
            load_tile(shared_address(s.sB[stage]), b, k * kTile, blockIdx.y * kTile, full);
        }
    }
}

// Each warp knows of its own quarter of the product only, so that each one arrives.
template <bool Cluster>
__device__ __forceinline__ void release(Storage &s, int stage) {
    const uint32_t empty = shared_address(&s.empty[stage]), lane = threadIdx.x % 32;
    if constexpr (Cluster) {
        if (lane < 2) arrive_at(empty, lane);
    } else {
        if (lane == 0) arrive(empty);
    }
}

// bf16 pairs through stmatrix into the 128B swizzle of the store's map.
__device__ __forceinline__ void store_tile(Storage &s, const float (&d)[32], const CUtensorMap *map) {
    const uint32_t t = threadIdx.x % 128, warp = t / 32, lane = t % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t packed[4];
#pragma unroll
        for (int q = 0; q < 4; ++q)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[q]) : "f"(d[8 * j + 2 * q + 1]), "f"(d[8 * j + 2 * q]));
        // Matrix q of the four: rows 8 (q % 2), columns 16 j + 8 (q / 2); lane 8 q + r gives the address of row r.
        const uint32_t row = warp * 16 + lane % 16, chunk = 2 * j + lane / 16;
        const uint32_t to = shared_address(s.sD) + row * 128 + ((chunk ^ (row % 8)) * 16);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(packed[0]),
                     "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                     : "memory");
    }
    fence_async_shared();
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (t == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                     "r"(blockIdx.y * kTile), "r"(blockIdx.x * kTile), "r"(shared_address(s.sD))
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}

template <bool Cluster>
__device__ __forceinline__ void consume(Storage &s, const CUtensorMap *map, int steps) {
    // K-major, 128B swizzle: 8 rows are 1024 bytes apart; the leading offset is unused.
    constexpr uint64_t kFields = (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16);
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
        const int stage = k % kStages;
        wait(shared_address(&s.full[stage]), k / kStages % 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            multiply(d, descriptor(kFields, shared_address(s.sA[stage]) + 32 * i),
                     descriptor(kFields, shared_address(s.sB[stage]) + 32 * i), 1);
        wgmma_commit();
        // The product of this step stays in flight; the one before it is done with its stage.
        wgmma_wait<1>();
        if (k > 0) release<Cluster>(s, (k - 1) % kStages);
    }
    wgmma_wait<0>();
    store_tile(s, d, map);
}

template <bool Cluster>
__device__ __forceinline__ void matmul(const CUtensorMap *a, const CUtensorMap *b, const CUtensorMap *d, int steps) {
    extern __shared__ __align__(1024) uint8_t smem[];
    Storage &s = *reinterpret_cast<Storage *>(smem);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), Cluster ? 8 : 4);
        }
        barrier_init_fence();
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    if constexpr (Cluster)
        cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == 0) produce<Cluster>(s, a, b, steps);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        consume<Cluster>(s, d, steps);
    }
    // Neither CTA may end while the other one still signals into its shared memory.
    if constexpr (Cluster) {
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace truth

extern "C" __global__ void __launch_bounds__(256, 1)
    matmul(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
           const __grid_constant__ CUtensorMap d, int steps) {
    truth::matmul<false>(&a, &b, &d, steps);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    matmul_cluster(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                   const __grid_constant__ CUtensorMap d, int steps) {
    truth::matmul<true>(&a, &b, &d, steps);
}
