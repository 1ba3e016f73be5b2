// wgmma with A in registers. A [64, K] is row-major in global memory; register q of thread t holds the 4 bytes of row
// 16 w + l / 4 + 8 (q % 2) at byte 4 (l % 4) + 16 (q / 2) of the K step's 32 bytes.
#include "wgmma.cuh"

namespace truth {

template <int Regs, class Register, class Element, class Multiply>
__device__ __forceinline__ void product_rs(const Operands &o, const Element *c, Element *out, Multiply multiply) {
    extern __shared__ __align__(1024) uint8_t smem[];
    copy_words(smem + o.b_offset, o.b, o.b_bytes);
    fence_async_shared();
    __syncthreads();
    const uint32_t *a = reinterpret_cast<const uint32_t *>(o.a);
    const int words = 8 * o.k_steps;  // of a row of A
    const int row = row_of(0), quad = threadIdx.x % 4;
    Register d[Regs];
    load_accumulator<Regs>(d, c);
#pragma unroll 1
    for (uint32_t k = 0; k < o.k_steps; ++k) {
        uint32_t fragment[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) fragment[q] = a[(row + q % 2 * 8) * words + 8 * k + q / 2 * 4 + quad];
        wgmma_fence();
        multiply(d, fragment, descriptor(o.b_descriptor, shared_address(smem + o.b_offset) + o.steps[2 * k + 1]),
                 static_cast<uint32_t>(k > 0 || o.scale_d));
        wgmma_commit();
        wgmma_wait<0>();  // the registers of A are free for the next step
    }
    store_accumulator<Regs>(d, out);
}

}  // namespace truth

#define WGMMA_RS(name, shape, types, Register, Element, constraint, regs, a0, a1, a2, a3, b, p, tail)                  \
    extern "C" __global__ void __launch_bounds__(128) name(const truth::Operands o, const Element *c, Element *out) {  \
        truth::product_rs<regs, Register>(                                                                             \
            o, c, out, [](Register(&d)[regs], const uint32_t(&a)[4], uint64_t db, uint32_t scale) {                    \
                asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p ", 0;\n\t"                                    \
                             "wgmma.mma_async.sync.aligned." shape "." types " {" LIST##regs "}, {%" #a0 ",%" #a1      \
                             ",%" #a2 ",%" #a3 "}, %" #b ", p" tail ";\n\t}"                                           \
                             : REGS##regs(constraint, 0)                                                               \
                             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db), "r"(scale));                      \
            });                                                                                                        \
    }

WGMMA_RS(bf16_n64, "m64n64k16", "f32.bf16.bf16", float, float, "+f", 32, 32, 33, 34, 35, 36, 37, ", 1, 1, 0")
WGMMA_RS(f16_n64_b_mn, "m64n64k16", "f32.f16.f16", float, float, "+f", 32, 32, 33, 34, 35, 36, 37, ", 1, 1, 1")
WGMMA_RS(f16_n32_half, "m64n32k16", "f16.f16.f16", uint32_t, uint16_t, "+r", 8, 8, 9, 10, 11, 12, 13, ", -1, 1, 0")
WGMMA_RS(e4m3_n32, "m64n32k32", "f32.e4m3.e4m3", float, float, "+f", 16, 16, 17, 18, 19, 20, 21, ", 1, 1")
WGMMA_RS(tf32_n8, "m64n8k8", "f32.tf32.tf32", float, float, "+f", 4, 4, 5, 6, 7, 8, 9, ", 1, 1")
WGMMA_RS(s8_n16, "m64n16k32", "s32.s8.s8", int, int, "+r", 8, 8, 9, 10, 11, 12, 13, "")
