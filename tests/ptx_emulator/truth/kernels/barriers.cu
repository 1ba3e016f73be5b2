// Named barriers of a CTA: subsets of warps, producers that only arrive, reductions, and warp barriers.
#include "common.cuh"

namespace truth {

__device__ __forceinline__ void bar_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace truth

// Two pairs of warps, each with a barrier of its own, exchange and rotate values for `rounds` rounds; then all join.
extern "C" __global__ void pairs(const uint32_t *in, uint32_t *out, uint32_t rounds) {
    __shared__ uint32_t values[2][128];
    const uint32_t t = threadIdx.x, pair = t / 64, inside = t % 64;
    uint32_t value = in[t];
    for (uint32_t i = 0; i < rounds; ++i) {
        values[i % 2][t] = value;
        truth::bar_sync(1 + pair, 64);
        value = values[i % 2][pair * 64 + (inside + 33) % 64] * 3 + i;
    }
    __syncthreads();
    values[0][t] = value;
    __syncthreads();
    out[t] = values[0][127 - t];
}

// One producer warp and three consumer warps over a ring of two slots: `full` barriers 2 and 3, `empty` 4 and 5.
extern "C" __global__ void producer_consumer(const uint32_t *in, uint32_t *out, uint32_t rounds) {
    __shared__ uint32_t slots[2][96];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        for (uint32_t i = 0; i < rounds; ++i) {
            if (i >= 2) truth::bar_sync(4 + i % 2, 128);
            for (uint32_t j = 0; j < 3; ++j) slots[i % 2][j * 32 + lane] = in[i * 96 + j * 32 + lane];
            truth::bar_arrive(2 + i % 2, 128);
        }
    } else {
        uint32_t sum = 0;
        for (uint32_t i = 0; i < rounds; ++i) {
            truth::bar_sync(2 + i % 2, 128);
            sum = sum * 7 + slots[i % 2][(warp - 1) * 32 + (lane ^ 5)];
            if (i + 2 < rounds) truth::bar_arrive(4 + i % 2, 128);
        }
        out[(warp - 1) * 32 + lane] = sum;
    }
}

// bar.red and its C++ forms: out [4, 128].
extern "C" __global__ void reductions(const uint32_t *in, uint32_t *out) {
    const uint32_t t = threadIdx.x, value = in[t];
    out[t] = __syncthreads_count(value % 3 == 0);
    out[128 + t] = __syncthreads_and(value < 1000) * 2 + __syncthreads_or(value == 77);
    uint32_t population;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "setp.gt.u32 p, %1, 50;\n\t"
                 "barrier.cta.red.popc.aligned.u32 %0, %2, 64, !p;\n\t"
                 "}"
                 : "=r"(population)
                 : "r"(value), "r"(3 + t / 64)
                 : "memory");
    out[256 + t] = population;
    if (t < 64) {
        uint32_t any;
        asm volatile("{\n\t"
                     ".reg .pred p, q;\n\t"
                     "setp.eq.u32 p, %1, %2;\n\t"
                     "bar.red.or.pred q, 5, 64, p;\n\t"
                     "selp.u32 %0, 1, 0, q;\n\t"
                     "}"
                     : "=r"(any)
                     : "r"(value), "r"(in[5])
                     : "memory");
        out[384 + t] = any;
    }
}

// Lanes that diverged meet at warp barriers: __syncwarp of a subset, then of all.
extern "C" __global__ void warp_barriers(const uint32_t *in, uint32_t *out) {
    __shared__ uint32_t values[32];
    const uint32_t lane = threadIdx.x;
    values[lane] = in[lane];
    __syncwarp();
    uint32_t value;
    if (lane % 2) {
        value = values[(lane + 2) % 32];
        __syncwarp(0xAAAAAAAAu);
        values[lane] = value + 1;
    } else {
        value = values[(lane + 4) % 32];
        __syncwarp(0x55555555u);
        values[lane] = value + 2;
    }
    __syncwarp();
    out[lane] = values[(lane + 1) % 32];
}
