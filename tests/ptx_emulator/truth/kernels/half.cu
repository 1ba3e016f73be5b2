// f16 and bf16 arithmetic, scalar and packed. Packed rows show 32-bit words; scalar rows the 16 bits zero-extended.
#include "common.cuh"

#define PACKED(text) asm volatile(text : "=r"(r) : "r"(x), "r"(y), "r"(z)); out[(row++) * 64 + i] = r;
#define SCALAR(text)                                                                              \
    asm volatile("{.reg .b16 a, b, c, d, n; mov.b32 {a, n}, %1; mov.b32 {b, n}, %2; mov.b32 {c, n}, %3; " text \
                 " cvt.u32.u16 %0, d;}"                                                           \
                 : "=r"(r)                                                                        \
                 : "r"(x), "r"(y), "r"(z));                                                       \
    out[(row++) * 64 + i] = r;

extern "C" __global__ void halves(const uint32_t *in, uint32_t *out) {
    const uint32_t i = threadIdx.x, x = in[i], y = in[64 + i], z = in[128 + i];
    uint32_t r, row = 0;
    PACKED("add.rn.f16x2 %0, %1, %2;")
    PACKED("sub.f16x2 %0, %1, %2;")
    PACKED("mul.rn.f16x2 %0, %1, %2;")
    PACKED("fma.rn.f16x2 %0, %1, %2, %3;")
    PACKED("fma.rn.relu.f16x2 %0, %1, %2, %3;")
    PACKED("fma.rn.sat.f16x2 %0, %1, %2, %3;")
    PACKED("add.ftz.f16x2 %0, %1, %2;")
    PACKED("mul.ftz.sat.f16x2 %0, %1, %2;")
    PACKED("min.f16x2 %0, %1, %2;")
    PACKED("max.NaN.f16x2 %0, %1, %2;")
    PACKED("min.xorsign.abs.f16x2 %0, %1, %2;")
    PACKED("abs.f16x2 %0, %1;")
    PACKED("neg.f16x2 %0, %1;")
    PACKED("set.gt.f16x2.f16x2 %0, %1, %2;")
    PACKED("set.leu.u32.f16x2 %0, %1, %2;")
    SCALAR("add.f16 d, a, b;")
    SCALAR("mul.sat.f16 d, a, b;")
    SCALAR("fma.rn.ftz.f16 d, a, b, c;")
    SCALAR("max.ftz.f16 d, a, b;")
    SCALAR("{.reg .pred p; setp.lt.f16 p, a, b; selp.b16 d, a, c, p;}")
    SCALAR("cvt.rni.f16.f16 d, a;")
    SCALAR("cvt.rmi.f16.f16 d, a;")
}

extern "C" __global__ void brains(const uint32_t *in, uint32_t *out) {
    const uint32_t i = threadIdx.x, x = in[i], y = in[64 + i], z = in[128 + i];
    uint32_t r, row = 0;
    PACKED("add.rn.bf16x2 %0, %1, %2;")
    PACKED("sub.rn.bf16x2 %0, %1, %2;")
    PACKED("mul.rn.bf16x2 %0, %1, %2;")
    PACKED("fma.rn.bf16x2 %0, %1, %2, %3;")
    PACKED("fma.rn.relu.bf16x2 %0, %1, %2, %3;")
    PACKED("min.bf16x2 %0, %1, %2;")
    PACKED("max.NaN.bf16x2 %0, %1, %2;")
    PACKED("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;")
    PACKED("abs.bf16x2 %0, %1;")
    PACKED("neg.bf16x2 %0, %1;")
    PACKED("set.gt.bf16x2.bf16x2 %0, %1, %2;")
    SCALAR("add.rn.bf16 d, a, b;")
    SCALAR("mul.rn.bf16 d, a, b;")
    SCALAR("fma.rn.bf16 d, a, b, c;")
    SCALAR("min.NaN.bf16 d, a, b;")
    SCALAR("{.reg .pred p; setp.gt.bf16 p, a, b; selp.b16 d, a, c, p;}")
}
