// State spaces and access forms: local arrays, constants, device variables with initialisers, calls, vectors, generic
// addresses, special registers.
#include "common.cuh"

__constant__ int kTable[12] = {5, -3, 17, 99, -1000, 65536, 0, 1, -1, 42, 7, 123456789};
__constant__ uint8_t kBytes[5] = {250, 1, 2, 128, 77};
__device__ float gScales[6] = {1.0f, -2.5f, 0.125f, 1024.0f, -0.0f, 3.0f};
__device__ uint64_t gCounter = 0x123456789abcdef0ull;
__device__ uint16_t gZeroed[40];
__device__ const uint32_t *gPointer = reinterpret_cast<const uint32_t *>(&gCounter);

struct Mixed {
    uint8_t byte;
    uint16_t half;
    uint32_t word;
    uint64_t wide;
};
__device__ Mixed gMixed[2] = {{1, 2, 3, 4}, {250, 65000, 0xdeadbeef, 0x0102030405060708ull}};

// A histogram and a small sort in a thread's own memory, indexed by data. out [2, size].
extern "C" __global__ void local_arrays(const uint32_t *in, uint32_t *out, uint32_t size) {
    const uint32_t i = threadIdx.x;
    uint32_t bins[16];
    uint8_t order[16];
    for (int j = 0; j < 16; ++j) {
        bins[j] = j;
        order[j] = static_cast<uint8_t>(j);
    }
    for (uint32_t j = 0; j < 24; ++j) bins[in[(i + j) % size] % 16] += in[(i * 3 + j) % size] % 100;
#pragma unroll 1
    for (int j = 1; j < 16; ++j) {
        const uint8_t key = order[j];
        int k = j;
        while (k > 0 && bins[order[k - 1]] > bins[key]) {
            order[k] = order[k - 1];
            --k;
        }
        order[k] = key;
    }
    uint32_t digest = 0;
    for (int j = 0; j < 16; ++j) digest = digest * 31 + order[j];
    out[i] = digest;
    out[size + i] = bins[in[i] % 16];
}

__device__ __noinline__ uint32_t collatz(uint32_t value, uint32_t limit) {
    uint32_t steps = 0;
    while (value != 1 && steps < limit) {
        value = value & 1 ? 3 * value + 1 : value >> 1;
        ++steps;
    }
    return steps;
}

__device__ __noinline__ void accumulate(const Mixed &from, uint64_t *into, uint32_t times) {
    for (uint32_t i = 0; i < times; ++i) *into = *into * 3 + from.wide + from.byte;
}

// Calls of functions that are not inlined: by value, by reference and through a pointer to local memory.
extern "C" __global__ void calls(const uint32_t *in, uint64_t *out) {
    const uint32_t i = threadIdx.x;
    uint64_t sum = collatz(in[i] % 1000 + 1, 200);
    if (in[i] % 2) sum += collatz(in[i] % 77 + 1, in[i] % 50);
    accumulate(gMixed[in[i] % 2], &sum, in[i] % 4);
    out[i] = sum;
}

// Constants and device variables, indexed by data; a variable that holds an address. out [9, 64].
extern "C" __global__ void variables(const uint32_t *in, uint32_t *out) {
    const uint32_t i = threadIdx.x, j = in[i];
    out[i] = static_cast<uint32_t>(kTable[j % 12]);
    out[64 + i] = kBytes[j % 5];
    out[128 + i] = __float_as_uint(gScales[j % 6] * static_cast<float>(static_cast<int>(j % 64) - 32));
    out[192 + i] = gZeroed[j % 40];
    out[256 + i] = gPointer[j % 2];
    const Mixed &m = gMixed[j % 2];
    out[320 + i] = m.byte + (static_cast<uint32_t>(m.half) << 8);
    out[384 + i] = m.word;
    out[448 + i] = static_cast<uint32_t>(m.wide >> (j % 32));
    __syncthreads();
    if (i < 40) gZeroed[i] = static_cast<uint16_t>(j);
    __syncthreads();
    if (i < 40) out[512 + i] = gZeroed[39 - i] + 1;
    __syncthreads();
    if (i < 40) gZeroed[i] = 0;  // the module may be launched again
}

// Vector and narrow loads and stores in global and shared memory, cached in every way. out [64, 16] of 32 bits.
extern "C" __global__ void access_forms(const uint8_t *in, uint32_t *out) {
    __shared__ __align__(16) uint8_t shared[64 * 16];
    const uint32_t i = threadIdx.x;
    const uint8_t *from = in + 16 * i;
    uint32_t *to = out + 16 * i;
    const uint4 quad = *reinterpret_cast<const uint4 *>(from);
    *reinterpret_cast<uint4 *>(shared + 16 * (i ^ 21)) = quad;
    __syncthreads();
    const ulonglong2 pair = *reinterpret_cast<const ulonglong2 *>(shared + 16 * i);
    to[0] = quad.x ^ quad.w;
    *reinterpret_cast<uint64_t *>(to + 2) = pair.x + pair.y;
    int32_t s8, s16;
    uint32_t u8, u16, a, b;
    asm volatile("ld.global.s8 %0, [%1+3];" : "=r"(s8) : "l"(from));
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1+5];" : "=r"(u8) : "l"(from));
    asm volatile("ld.shared.s16 %0, [%1+6];" : "=r"(s16) : "r"(truth::shared_address(shared + 16 * i)));
    asm volatile("ld.shared.u16 %0, [%1+8];" : "=r"(u16) : "r"(truth::shared_address(shared + 16 * i)));
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2+8];" : "=r"(a), "=r"(b) : "l"(from));
    to[1] = a + 3 * b;
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4), "r"(s8), "r"(u8), "r"(s16), "r"(u16) : "memory");
    uint16_t h0, h1, h2, h3;
    asm volatile("ld.volatile.global.v4.u16 {%0, %1, %2, %3}, [%4];" : "=h"(h0), "=h"(h1), "=h"(h2), "=h"(h3) : "l"(from));
    asm volatile("st.global.wt.v2.u16 [%0], {%1, %2};" ::"l"(to + 8), "h"(h3), "h"(h1) : "memory");
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to + 9), "h"(h2) : "memory");
    asm volatile("st.global.u8 [%0+2], %1;" ::"l"(to + 9), "r"(u8) : "memory");
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(a) : "l"(from + 12) : "memory");
    asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(b) : "r"(truth::shared_address(shared + 16 * i)) : "memory");
    to[10] = a - b;
    // Generic addresses of three kinds, picked per lane.
    uint32_t own[2] = {u8 + 1, i};
    const uint32_t *where[3] = {reinterpret_cast<const uint32_t *>(from), reinterpret_cast<uint32_t *>(shared) + 4 * i, own};
    const uint32_t *picked = where[i % 3];
    to[11] = picked[0] + picked[1];
    uint32_t kind;
    asm volatile("{.reg .pred p, q, r; isspacep.shared p, %1; isspacep.local q, %1; isspacep.global r, %1; "
                 "selp.u32 %0, 1, 0, p; @q add.u32 %0, %0, 2; @r add.u32 %0, %0, 4;}"
                 : "=r"(kind)
                 : "l"(picked));
    to[12] = kind;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    asm volatile("{.reg .f32 f; ld.global.ca.f32 f, [%1]; mov.b32 %0, f;}" : "=r"(a) : "l"(from));
    to[13] = a;
    to[14] = h0;
}

// The registers that name a thread; grid and block have three dimensions. One row of 11 words per thread.
extern "C" __global__ void special_registers(uint32_t *out) {
    extern __shared__ uint32_t dynamic[];
    const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    uint32_t *row = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 11;
    uint32_t lane, equal, less, le, gt, bytes;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm volatile("mov.u32 %0, %%lanemask_eq;" : "=r"(equal));
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(less));
    asm volatile("mov.u32 %0, %%lanemask_le;" : "=r"(le));
    asm volatile("mov.u32 %0, %%lanemask_gt;" : "=r"(gt));
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    row[0] = threadIdx.x + 100 * threadIdx.y + 10000 * threadIdx.z;
    row[1] = blockDim.x + 100 * blockDim.y + 10000 * blockDim.z;
    row[2] = blockIdx.x + 100 * blockIdx.y + 10000 * blockIdx.z;
    row[3] = gridDim.x + 100 * gridDim.y + 10000 * gridDim.z;
    row[4] = lane;
    row[5] = equal;
    row[6] = less;
    row[7] = le;
    row[8] = gt;
    row[9] = bytes;
    dynamic[thread] = thread * thread;
    __syncthreads();
    row[10] = dynamic[(thread + 7) % (blockDim.x * blockDim.y * blockDim.z)];
}

// Scalar parameters of every size, and a structure.
extern "C" __global__ void parameters(uint64_t *out, int8_t a, uint8_t b, int16_t c, uint16_t d, int32_t e, uint32_t f,
                                      int64_t g, uint64_t h, float s, double t, const Mixed m) {
    if (threadIdx.x != 0) return;
    out[0] = static_cast<uint64_t>(static_cast<int64_t>(a));
    out[1] = b;
    out[2] = static_cast<uint64_t>(static_cast<int64_t>(c));
    out[3] = d;
    out[4] = static_cast<uint64_t>(static_cast<int64_t>(e));
    out[5] = f;
    out[6] = static_cast<uint64_t>(g);
    out[7] = h;
    out[8] = __float_as_uint(s);
    out[9] = static_cast<uint64_t>(__double_as_longlong(t));
    out[10] = m.byte + (static_cast<uint64_t>(m.half) << 8) + (static_cast<uint64_t>(m.word) << 32);
    out[11] = m.wide;
}
