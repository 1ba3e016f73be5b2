// Warp-level exchange: shfl, vote, match, redux, elect; divergence and reconvergence.
#include "common.cuh"

// out [8, 2, 32]: value and predicate of the four modes, then again in segments given by `control` and per-lane b.
extern "C" __global__ void shuffles(const uint32_t *in, const uint32_t *b, const uint32_t *control, uint32_t *out) {
    const uint32_t lane = threadIdx.x;
#define SHUFFLE(slot, mode, from, clamp)                                    \
    {                                                                       \
        uint32_t value, valid;                                              \
        asm volatile("{\n\t"                                                \
                     ".reg .pred p;\n\t"                                    \
                     "shfl.sync." mode ".b32 %0|p, %2, %3, %4, 0xffffffff;\n\t" \
                     "selp.u32 %1, 1, 0, p;\n\t"                            \
                     "}"                                                    \
                     : "=r"(value), "=r"(valid)                             \
                     : "r"(in[lane]), "r"(from), "r"(clamp));               \
        out[(slot)*64 + lane] = value;                                      \
        out[(slot)*64 + 32 + lane] = valid;                                 \
    }
    SHUFFLE(0, "idx", 5, 0x1f)
    SHUFFLE(1, "up", 3, 0)
    SHUFFLE(2, "down", 7, 0x1f)
    SHUFFLE(3, "bfly", 9, 0x1f)
    SHUFFLE(4, "idx", b[lane], control[0])
    SHUFFLE(5, "up", b[lane], control[1])
    SHUFFLE(6, "down", b[lane], control[2])
    SHUFFLE(7, "bfly", b[lane], control[3])
#undef SHUFFLE
}

// The C++ forms, in groups of 8 and of doubles, and a reduction by halves. out [4, 32] of 64-bit words.
extern "C" __global__ void shuffle_forms(const uint64_t *in, uint64_t *out) {
    const uint32_t lane = threadIdx.x;
    uint64_t value = in[lane];
    out[lane] = __shfl_sync(0xffffffffu, static_cast<unsigned long long>(value), static_cast<int>(value % 40), 8);
    out[32 + lane] = __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(value), 12, 16);
    out[64 + lane] = __shfl_down_sync(0xffffffffu, static_cast<unsigned long long>(value), 3, 4);
    uint32_t sum = static_cast<uint32_t>(value);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    out[96 + lane] = sum;
}

// out [16, 32]
extern "C" __global__ void votes(const uint32_t *in, uint32_t *out) {
    const uint32_t lane = threadIdx.x, value = in[lane];
    const uint64_t wide = (static_cast<uint64_t>(value % 3) << 40) | 5;
    out[lane] = __ballot_sync(0xffffffffu, value % 2);
    out[32 + lane] = __any_sync(0xffffffffu, value == in[7]) * 2 + __all_sync(0xffffffffu, value < 0x80000000u);
    out[64 + lane] = __match_any_sync(0xffffffffu, value % 5);
    out[96 + lane] = __match_any_sync(0xffffffffu, static_cast<unsigned long long>(wide));
    int same;
    out[128 + lane] = __match_all_sync(0xffffffffu, value | 0xffffffffu, &same);
    out[160 + lane] = same;
    out[192 + lane] = __match_all_sync(0xffffffffu, value % 5, &same);
    out[224 + lane] = same;
    uint32_t uniform;
    asm volatile("{\n\t"
                 ".reg .pred p, q;\n\t"
                 "setp.gt.u32 p, %1, 3;\n\t"
                 "vote.sync.uni.pred q, p, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, q;\n\t"
                 "}"
                 : "=r"(uniform)
                 : "r"(lane));
    out[256 + lane] = uniform;
    // Subsets, each side of a branch with the mask of its own lanes.
    const uint32_t odd = __ballot_sync(0xffffffffu, value % 2), even = ~odd;
    if (value % 2) {
        out[288 + lane] = __ballot_sync(odd, lane % 3 == 0);
        out[320 + lane] = __match_any_sync(odd, value % 4);
        out[352 + lane] = __reduce_add_sync(odd, value);
        out[384 + lane] = __shfl_sync(odd, value, __ffs(odd) - 1);
    } else {
        out[288 + lane] = __ballot_sync(even, lane % 5 == 0);
        out[320 + lane] = __match_any_sync(even, value % 6);
        out[352 + lane] = __reduce_max_sync(even, value);
        out[384 + lane] = __shfl_sync(even, value, 31 - __clz(even));
    }
    __syncwarp();
    uint32_t leader, elected;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "elect.sync %0|p, 0xffffffff;\n\t"
                 "selp.u32 %1, 1, 0, p;\n\t"
                 "}"
                 : "=r"(leader), "=r"(elected));
    out[416 + lane] = leader * 2 + elected;
    if (lane >= 9) {
        asm volatile("{\n\t"
                     ".reg .pred p;\n\t"
                     "elect.sync %0|p, 0xfffffe00;\n\t"
                     "selp.u32 %1, 1, 0, p;\n\t"
                     "}"
                     : "=r"(leader), "=r"(elected));
        out[448 + lane] = leader * 2 + elected;
    }
    uint32_t lower, at_least;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
    asm volatile("mov.u32 %0, %%lanemask_ge;" : "=r"(at_least));
    out[480 + lane] = __popc(lower) * 64 + __popc(at_least & 0x0ff0u);
}

// out [8, 32]
extern "C" __global__ void reductions(const uint32_t *in, uint32_t *out) {
    const uint32_t lane = threadIdx.x, value = in[lane];
    out[lane] = __reduce_add_sync(0xffffffffu, value);
    out[32 + lane] = __reduce_min_sync(0xffffffffu, value);
    out[64 + lane] = __reduce_max_sync(0xffffffffu, value);
    out[96 + lane] = __reduce_min_sync(0xffffffffu, static_cast<int>(value));
    out[128 + lane] = __reduce_max_sync(0xffffffffu, static_cast<int>(value));
    out[160 + lane] = __reduce_and_sync(0xffffffffu, value | 0x00f0f000u);
    out[192 + lane] = __reduce_or_sync(0xffffffffu, value & 0x0f0f0f0fu);
    out[224 + lane] = __reduce_xor_sync(0xffffffffu, value);
}

// Loops of different length, nested branches, early return and a switch; `path` counts what each lane went through.
extern "C" __global__ void divergence(const uint32_t *in, uint32_t *out, uint32_t size) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    uint32_t value = in[i], path = 0;
    while (value > 1 && path < 60) {
        value = value % 2 ? 3 * value + 1 : value / 2;
        ++path;
        if (value == 40) break;
        if (value % 7 == 3) continue;
        path += 100;
    }
    switch (in[i] % 9) {
        case 0: path += __popc(value) * 1000; break;
        case 1: path ^= 0x10000; [[fallthrough]];
        case 2: path = path * 3; break;
        case 3: path -= 5; break;
        case 4:
            for (uint32_t j = 0; j < in[i] % 5; ++j) path += j * j;
            break;
        case 5: path = ~path; break;
        case 6: path = __brev(path); break;
        case 7: path = path << (value % 8); break;
        default: path |= 1u << 31;
    }
    out[i] = path;
}

// An indexed branch whose targets differ per lane; target 3 falls through to the end.
extern "C" __global__ void branch_table(const uint32_t *in, uint32_t *out) {
    const uint32_t lane = threadIdx.x;
    uint32_t value = in[lane];
    asm volatile("{\n\t"
                 "targets: .branchtargets first, second, third, finish;\n\t"
                 "brx.idx %1, targets;\n\t"
                 "first:\n\t"
                 "add.u32 %0, %0, 1000;\n\t"
                 "bra finish;\n\t"
                 "second:\n\t"
                 "mul.lo.u32 %0, %0, 3;\n\t"
                 "third:\n\t"
                 "xor.b32 %0, %0, 85;\n\t"
                 "finish:\n\t"
                 "}"
                 : "+r"(value)
                 : "r"(value % 4));
    out[lane] = value;
}
