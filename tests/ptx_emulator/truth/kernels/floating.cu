// f32 and f64 instructions, one output row per instruction in the order written: the names in the cases follow it.
#include "common.cuh"

#define ROW(text) asm volatile(text : "=f"(r) : "f"(x), "f"(y), "f"(z)); out[(row++) * 64 + i] = r;
#define FOUR(before, after) ROW(before "rn" after) ROW(before "rz" after) ROW(before "rm" after) ROW(before "rp" after)

extern "C" __global__ void singles(const float *in, float *out) {
    const uint32_t i = threadIdx.x;
    const float x = in[i], y = in[64 + i], z = in[128 + i];
    float r;
    uint32_t row = 0;
    FOUR("add.", ".f32 %0, %1, %2;")
    FOUR("mul.", ".f32 %0, %1, %2;")
    FOUR("fma.", ".f32 %0, %1, %2, %3;")
    FOUR("div.", ".f32 %0, %1, %2;")
    FOUR("rcp.", ".f32 %0, %1;")
    FOUR("sqrt.", ".f32 %0, %1;")
    ROW("sub.rm.f32 %0, %1, %2;")
    ROW("add.rn.ftz.f32 %0, %1, %2;")
    ROW("mul.rz.ftz.f32 %0, %1, %2;")
    ROW("fma.rn.ftz.f32 %0, %1, %2, %3;")
    ROW("div.rn.ftz.f32 %0, %1, %2;")
    ROW("add.sat.f32 %0, %1, %2;")
    ROW("fma.rn.sat.f32 %0, %1, %2, %3;")
    ROW("mul.ftz.sat.f32 %0, %1, %2;")
    ROW("min.f32 %0, %1, %2;")
    ROW("max.f32 %0, %1, %2;")
    ROW("min.NaN.f32 %0, %1, %2;")
    ROW("max.ftz.f32 %0, %1, %2;")
    ROW("max.NaN.ftz.f32 %0, %1, %2;")
    ROW("min.xorsign.abs.f32 %0, %1, %2;")
    ROW("abs.f32 %0, %1;")
    ROW("neg.f32 %0, %1;")
    ROW("abs.ftz.f32 %0, %1;")
    ROW("neg.ftz.f32 %0, %1;")
    ROW("copysign.f32 %0, %1, %2;")
    ROW("cvt.rni.f32.f32 %0, %1;")
    ROW("cvt.rmi.f32.f32 %0, %1;")
    ROW("cvt.rpi.ftz.f32.f32 %0, %1;")
    ROW("cvt.rzi.f32.f32 %0, %1;")
    ROW("cvt.sat.f32.f32 %0, %1;")
}

// Bit g of out[row] is the g-th comparison or class: rows eq ne lt le gt ge equ neu ltu leu gtu geu num nan, then testp
// finite infinite number notanumber normal subnormal, then eq.ftz and lt.ftz.
extern "C" __global__ void comparisons(const float *in, uint32_t *out) {
    const uint32_t i = threadIdx.x;
    const float x = in[i], y = in[64 + i];
    uint32_t bits = 0, r, bit = 0;
#define TEST(text)                                                                                   \
    asm volatile("{.reg .pred p; " text " selp.u32 %0, 1, 0, p;}" : "=r"(r) : "f"(x), "f"(y));      \
    bits |= r << bit++;
    TEST("setp.eq.f32 p, %1, %2;")
    TEST("setp.ne.f32 p, %1, %2;")
    TEST("setp.lt.f32 p, %1, %2;")
    TEST("setp.le.f32 p, %1, %2;")
    TEST("setp.gt.f32 p, %1, %2;")
    TEST("setp.ge.f32 p, %1, %2;")
    TEST("setp.equ.f32 p, %1, %2;")
    TEST("setp.neu.f32 p, %1, %2;")
    TEST("setp.ltu.f32 p, %1, %2;")
    TEST("setp.leu.f32 p, %1, %2;")
    TEST("setp.gtu.f32 p, %1, %2;")
    TEST("setp.geu.f32 p, %1, %2;")
    TEST("setp.num.f32 p, %1, %2;")
    TEST("setp.nan.f32 p, %1, %2;")
    TEST("testp.finite.f32 p, %1;")
    TEST("testp.infinite.f32 p, %1;")
    TEST("testp.number.f32 p, %1;")
    TEST("testp.notanumber.f32 p, %1;")
    TEST("testp.normal.f32 p, %1;")
    TEST("testp.subnormal.f32 p, %1;")
    TEST("setp.eq.ftz.f32 p, %1, %2;")
    TEST("setp.lt.ftz.f32 p, %1, %2;")
#undef TEST
    out[i] = bits;
    asm volatile("set.gt.u32.f32 %0, %1, %2;" : "=r"(r) : "f"(x), "f"(y));
    out[64 + i] = r;
    asm volatile("set.le.ftz.f32.f32 %0, %1, %2;" : "=r"(r) : "f"(x), "f"(y));
    out[128 + i] = r;
}

#define ROW64(text) asm volatile(text : "=d"(r) : "d"(x), "d"(y), "d"(z)); out[(row++) * 64 + i] = r;
#define FOUR64(before, after) \
    ROW64(before "rn" after) ROW64(before "rz" after) ROW64(before "rm" after) ROW64(before "rp" after)

extern "C" __global__ void doubles(const double *in, double *out) {
    const uint32_t i = threadIdx.x;
    const double x = in[i], y = in[64 + i], z = in[128 + i];
    double r;
    uint32_t row = 0;
    FOUR64("add.", ".f64 %0, %1, %2;")
    FOUR64("mul.", ".f64 %0, %1, %2;")
    FOUR64("fma.", ".f64 %0, %1, %2, %3;")
    ROW64("div.rn.f64 %0, %1, %2;")
    ROW64("div.rp.f64 %0, %1, %2;")
    ROW64("rcp.rn.f64 %0, %1;")
    ROW64("sqrt.rn.f64 %0, %1;")
    ROW64("sqrt.rm.f64 %0, %1;")
    ROW64("min.f64 %0, %1, %2;")
    ROW64("max.f64 %0, %1, %2;")
    ROW64("abs.f64 %0, %1;")
    ROW64("neg.f64 %0, %1;")
    ROW64("cvt.rni.f64.f64 %0, %1;")
    ROW64("cvt.rmi.f64.f64 %0, %1;")
    ROW64("{.reg .f32 s; cvt.rn.f32.f64 s, %1; cvt.f64.f32 %0, s;}")
    ROW64("{.reg .f32 s; cvt.rz.f32.f64 s, %1; cvt.f64.f32 %0, s;}")
    ROW64("{.reg .f32 s; cvt.rp.f32.f64 s, %1; cvt.f64.f32 %0, s;}")
    ROW64("{.reg .pred p; setp.ltu.f64 p, %1, %2; selp.f64 %0, %1, %2, p;}")
}
