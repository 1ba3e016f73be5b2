// atom and red on global and shared memory. Old values are shown where each thread has a word of its own; where threads
// meet in one word only its final value, and the operations commute exactly on the integers used.
#include "common.cuh"

#define OLD32(slot, text) \
    asm volatile(text : "=r"(old) : "l"(word + (slot)*64), "r"(value), "r"(compare) : "memory"); out[(slot)*64 + t] = old;
#define OLD64(slot, text) \
    asm volatile(text : "=l"(old) : "l"(word + (slot)*64), "l"(value), "l"(compare) : "memory"); out[(slot)*64 + t] = old;

// One word per thread and operation: words, out [28, 64].
extern "C" __global__ void old_values_32(uint32_t *words, const uint32_t *in, uint32_t *out) {
    const uint32_t t = threadIdx.x, value = in[t], compare = in[64 + t];
    uint32_t *word = words + t, old;
    OLD32(0, "atom.global.add.u32 %0, [%1], %2;")
    OLD32(1, "atom.global.add.s32 %0, [%1], %2;")
    OLD32(2, "atom.global.min.u32 %0, [%1], %2;")
    OLD32(3, "atom.global.max.u32 %0, [%1], %2;")
    OLD32(4, "atom.global.min.s32 %0, [%1], %2;")
    OLD32(5, "atom.global.max.s32 %0, [%1], %2;")
    OLD32(6, "atom.global.and.b32 %0, [%1], %2;")
    OLD32(7, "atom.global.or.b32 %0, [%1], %2;")
    OLD32(8, "atom.global.xor.b32 %0, [%1], %2;")
    OLD32(9, "atom.global.inc.u32 %0, [%1], %2;")
    OLD32(10, "atom.global.dec.u32 %0, [%1], %2;")
    OLD32(11, "atom.global.exch.b32 %0, [%1], %2;")
    OLD32(12, "atom.global.cas.b32 %0, [%1], %3, %2;")
    OLD32(13, "atom.acq_rel.gpu.global.cas.b32 %0, [%1], %3, %2;")
    OLD32(14, "atom.relaxed.sys.global.add.u32 %0, [%1], %2;")
    OLD32(15, "atom.global.add.f32 %0, [%1], %2;")
    OLD32(16, "atom.global.add.noftz.f16x2 %0, [%1], %2;")
    OLD32(17, "atom.global.add.noftz.bf16x2 %0, [%1], %2;")
    OLD32(18, "atom.release.cta.global.exch.b32 %0, [%1], %2;")
    OLD32(19, "atom.add.u32 %0, [%1], %2;")
}

// words, out [14, 64] of 64 bits.
extern "C" __global__ void old_values_64(uint64_t *words, const uint64_t *in, uint64_t *out) {
    const uint32_t t = threadIdx.x;
    const uint64_t value = in[t], compare = in[64 + t];
    uint64_t *word = words + t, old;
    OLD64(0, "atom.global.add.u64 %0, [%1], %2;")
    OLD64(1, "atom.global.min.u64 %0, [%1], %2;")
    OLD64(2, "atom.global.max.u64 %0, [%1], %2;")
    OLD64(3, "atom.global.min.s64 %0, [%1], %2;")
    OLD64(4, "atom.global.max.s64 %0, [%1], %2;")
    OLD64(5, "atom.global.and.b64 %0, [%1], %2;")
    OLD64(6, "atom.global.or.b64 %0, [%1], %2;")
    OLD64(7, "atom.global.xor.b64 %0, [%1], %2;")
    OLD64(8, "atom.global.exch.b64 %0, [%1], %2;")
    OLD64(9, "atom.global.cas.b64 %0, [%1], %3, %2;")
    OLD64(10, "atom.global.add.f64 %0, [%1], %2;")
}

// 16-bit words: out [3, 64].
extern "C" __global__ void old_values_16(uint16_t *words, const uint16_t *in, uint16_t *out) {
    const uint32_t t = threadIdx.x;
    const uint16_t value = in[t], compare = in[64 + t];
    uint16_t *word = words + t, old;
    asm volatile("atom.global.add.noftz.f16 %0, [%1], %2;" : "=h"(old) : "l"(word), "h"(value) : "memory");
    out[t] = old;
    asm volatile("atom.global.add.noftz.bf16 %0, [%1], %2;" : "=h"(old) : "l"(word + 64), "h"(value) : "memory");
    out[64 + t] = old;
    asm volatile("atom.global.cas.b16 %0, [%1], %2, %3;" : "=h"(old) : "l"(word + 128), "h"(compare), "h"(value) : "memory");
    out[128 + t] = old;
}

// 256 threads of 2 CTAs meet in a few words. totals [64] of 32 bits, wide [16] of 64 bits.
extern "C" __global__ void contended(uint32_t *totals, uint64_t *wide, const uint32_t *in) {
    __shared__ uint32_t local[8];
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, value = in[i], bin = value % 4;
    if (threadIdx.x < 8) local[threadIdx.x] = 0;
    __syncthreads();
    const float real = static_cast<float>(static_cast<int>(value % 64) - 32);
#define RED(slot, text, constraint, operand) \
    asm volatile("red" text " [%0], %1;" ::"l"(totals + (slot) + bin), constraint(operand) : "memory");
    RED(0, ".global.add.u32", "r", value)
    RED(4, ".relaxed.gpu.global.min.u32", "r", value)
    RED(8, ".global.max.s32", "r", value)
    RED(12, ".global.and.b32", "r", value | 0xff00u)
    RED(16, ".global.or.b32", "r", value & 0x00ff00ffu)
    RED(20, ".global.xor.b32", "r", value)
    RED(24, ".global.inc.u32", "r", 12)
    RED(28, ".global.add.f32", "f", real)
    RED(32, ".release.gpu.global.add.s32", "r", value)
#undef RED
    atomicAdd(reinterpret_cast<unsigned long long *>(wide + bin), static_cast<unsigned long long>(value) << 20);
    atomicMax(reinterpret_cast<unsigned long long *>(wide + 4 + bin), static_cast<unsigned long long>(value) << 8);
    atomicAdd(reinterpret_cast<double *>(wide + 8 + bin), static_cast<double>(value % 1000));
    atomicAdd(&local[bin], value);
    atomicMax(reinterpret_cast<int *>(&local[4 + bin]), static_cast<int>(value));
    __syncthreads();
    if (threadIdx.x < 8) atomicAdd(&totals[40 + threadIdx.x], local[threadIdx.x]);
    // A lock-free maximum by compare and swap.
    uint32_t seen = *reinterpret_cast<volatile uint32_t *>(totals + 48 + bin);
    while (seen < value) {
        const uint32_t old = atomicCAS(&totals[48 + bin], seen, value);
        if (old == seen) break;
        seen = old;
    }
}

// Vector reductions: each of two CTAs adds into the same words. out: f32 [64, 4], then f16x2 [64, 4], bf16x2 [64, 4].
extern "C" __global__ void vector_red(float *floats, uint32_t *halves, uint32_t *brains, const uint32_t *in) {
    const uint32_t t = threadIdx.x;
    const float *f = reinterpret_cast<const float *>(in) + blockIdx.x * 256 + 4 * t;
    const uint32_t *h = in + 512 + blockIdx.x * 256 + 4 * t, *b = in + 1024 + blockIdx.x * 256 + 4 * t;
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(floats + 4 * t), "f"(f[0]), "f"(f[1]), "f"(f[2]),
                 "f"(f[3])
                 : "memory");
    asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(halves + 4 * t), "r"(h[0]), "r"(h[1]),
                 "r"(h[2]), "r"(h[3])
                 : "memory");
    asm volatile("red.global.add.noftz.v2.bf16x2 [%0], {%1, %2};" ::"l"(brains + 4 * t), "r"(b[0]), "r"(b[1]) : "memory");
    asm volatile("red.global.max.noftz.v2.bf16x2 [%0], {%1, %2};" ::"l"(brains + 4 * t + 2), "r"(b[2]), "r"(b[3])
                 : "memory");
}

// The last CTA to finish sums what all wrote (a counter with release and acquire, no waiting).
extern "C" __global__ void last_block(const uint32_t *in, uint32_t *partial, uint32_t *counter, uint32_t *out) {
    __shared__ uint32_t last;
    const uint32_t t = threadIdx.x;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 8; ++i) sum += in[(blockIdx.x * 8 + i) * 32 + t];
    partial[blockIdx.x * 32 + t] = sum;
    __threadfence();
    __syncthreads();
    if (t == 0) last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (last) {
        __threadfence();
        uint32_t total = 0;
        for (uint32_t i = 0; i < gridDim.x; ++i) total = total * 3 + reinterpret_cast<volatile uint32_t *>(partial)[i * 32 + t];
        out[t] = total;
    }
}
