// Non-bulk cp.async: sizes 4, 8 and 16, zero fill by a shorter source and by a predicate, groups, and arrival on a
// barrier with and without .noinc.
#include "common.cuh"

namespace truth {

constexpr uint32_t kUntouched = 0xA5A5A5A5u;

}  // namespace truth

// Thread t copies slot t of 16 bytes: size 4 in row 0, 8 in row 1, 16 (.ca) in row 2 and (.cg) in row 3. source_sizes
// [4, 64] says how many bytes are read; the rest of the copy is zeros.
extern "C" __global__ void copy_sizes(const uint8_t *in, const uint32_t *source_sizes, uint8_t *out) {
    __shared__ __align__(128) uint8_t smem[4 * 64 * 16];
    truth::fill_words(smem, truth::kUntouched, sizeof(smem));
    __syncthreads();
    const uint32_t t = threadIdx.x, row = 64 * 16;
    const uint32_t to = truth::shared_address(smem) + 16 * t;
    const uint8_t *from = in + 16 * t;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(source_sizes[t]) : "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to + row), "l"(from + row),
                 "r"(source_sizes[64 + t])
                 : "memory");
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + 2 * row), "l"(from + 2 * row),
                 "r"(source_sizes[128 + t])
                 : "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + 3 * row), "l"(from + 3 * row),
                 "r"(source_sizes[192 + t])
                 : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    truth::copy_words(out, smem, sizeof(smem));
}

// A predicate that is true makes the copy write zeros; none of the groups but the last may be pending at its use.
extern "C" __global__ void copy_groups(const uint8_t *in, const uint32_t *ignore, uint8_t *out, uint32_t rounds) {
    __shared__ __align__(128) uint8_t smem[3][64 * 16];
    const uint32_t t = threadIdx.x;
    for (uint32_t i = 0; i < rounds + 2; ++i) {
        if (i < rounds) {
            asm volatile("{\n\t"
                         ".reg .pred skip;\n\t"
                         "setp.ne.b32 skip, %2, 0;\n\t"
                         "cp.async.cg.shared.global [%0], [%1], 16, skip;\n\t"
                         "}" ::"r"(truth::shared_address(smem[i % 3]) + 16 * t),
                         "l"(in + (i * 64 + t) * 16), "r"(ignore[i * 64 + t])
                         : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (i >= 2) {
            asm volatile("cp.async.wait_group 2;" ::: "memory");
            __syncthreads();
            // Another thread's piece, so that the barrier above is needed.
            const uint32_t other = 63 - t;
            for (int w = 0; w < 4; ++w)
                reinterpret_cast<uint32_t *>(out)[((i - 2) * 64 + other) * 4 + w] =
                    reinterpret_cast<uint32_t *>(smem[(i - 2) % 3])[other * 4 + w];
            __syncthreads();
        }
    }
}

// `noinc`: the barrier counts the 64 arrivals of the copies; else they count themselves and 64 plain arrivals end it.
extern "C" __global__ void copy_arrive(const uint8_t *in, uint8_t *out, uint32_t noinc) {
    __shared__ __align__(128) uint8_t smem[64 * 16];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage), t = threadIdx.x;
    if (t == 0) truth::barrier_init(barrier, 64);
    __syncthreads();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(truth::shared_address(smem) + 16 * t),
                 "l"(in + 16 * t)
                 : "memory");
    if (noinc) {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
    } else {
        asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
        truth::arrive(barrier);
    }
    truth::wait(barrier, 0);
    const uint32_t other = 63 - t;
    for (int w = 0; w < 4; ++w)
        reinterpret_cast<uint32_t *>(out)[other * 4 + w] = reinterpret_cast<uint32_t *>(smem)[other * 4 + w];
}
