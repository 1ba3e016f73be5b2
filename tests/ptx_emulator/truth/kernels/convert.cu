// cvt between floating-point and integer formats, one output row per instruction in the order written. Narrow results
// are zero-extended to 32 bits.
#include "common.cuh"

#define ROW(text) asm volatile(text : "=r"(r) : "f"(x), "f"(y)); out[(row++) * 128 + i] = r;
#define SHORT(text) ROW("{.reg .b16 h; " text " cvt.u32.u16 %0, h;}")

// From f32, 128 values.
extern "C" __global__ void from_single(const float *in, uint32_t *out) {
    const uint32_t i = threadIdx.x;
    const float x = in[i], y = in[128 + i];
    uint32_t r, row = 0;
    ROW("cvt.rni.s32.f32 %0, %1;")
    ROW("cvt.rzi.s32.f32 %0, %1;")
    ROW("cvt.rmi.s32.f32 %0, %1;")
    ROW("cvt.rpi.s32.f32 %0, %1;")
    ROW("cvt.rni.u32.f32 %0, %1;")
    ROW("cvt.rzi.ftz.u32.f32 %0, %1;")
    ROW("cvt.rpi.ftz.s32.f32 %0, %1;")
    SHORT("cvt.rni.s16.f32 h, %1;")
    SHORT("cvt.rzi.u16.f32 h, %1;")
    SHORT("{.reg .s32 w; .reg .s8 b; cvt.rni.sat.s8.f32 b, %1; cvt.s32.s8 w, b; cvt.u16.u32 h, w;}")
    SHORT("{.reg .u32 w; .reg .u8 b; cvt.rzi.sat.u8.f32 b, %1; cvt.u32.u8 w, b; cvt.u16.u32 h, w;}")
    SHORT("cvt.rn.f16.f32 h, %1;")
    SHORT("cvt.rz.f16.f32 h, %1;")
    SHORT("cvt.rm.f16.f32 h, %1;")
    SHORT("cvt.rp.f16.f32 h, %1;")
    SHORT("cvt.rn.relu.f16.f32 h, %1;")
    SHORT("cvt.rn.sat.f16.f32 h, %1;")
    SHORT("cvt.rn.bf16.f32 h, %1;")
    SHORT("cvt.rz.bf16.f32 h, %1;")
    SHORT("cvt.rm.bf16.f32 h, %1;")
    SHORT("cvt.rp.bf16.f32 h, %1;")
    SHORT("cvt.rn.relu.bf16.f32 h, %1;")
    ROW("cvt.rn.f16x2.f32 %0, %1, %2;")
    ROW("cvt.rz.relu.f16x2.f32 %0, %1, %2;")
    ROW("cvt.rn.bf16x2.f32 %0, %1, %2;")
    ROW("cvt.rz.bf16x2.f32 %0, %1, %2;")
    ROW("cvt.rna.tf32.f32 %0, %1;")
    ROW("cvt.rn.tf32.f32 %0, %1;")
    ROW("cvt.rz.tf32.f32 %0, %1;")
    ROW("cvt.rn.relu.tf32.f32 %0, %1;")
    SHORT("cvt.rn.satfinite.e4m3x2.f32 h, %1, %2;")
    SHORT("cvt.rn.satfinite.e5m2x2.f32 h, %1, %2;")
    SHORT("cvt.rn.satfinite.relu.e4m3x2.f32 h, %1, %2;")
    ROW("{.reg .b64 d; cvt.rni.s64.f32 d, %1; mov.b64 {%0, _}, d;}")
    ROW("{.reg .b64 d; cvt.rzi.s64.f32 d, %1; mov.b64 {_, %0}, d;}")
    ROW("{.reg .b64 d; cvt.rpi.u64.f32 d, %1; mov.b64 {_, %0}, d;}")
    ROW("{.reg .f64 d; cvt.f64.f32 d, %1; mov.b64 {_, %0}, d;}")
}

#define INT_ROW(text) asm volatile(text : "=r"(r) : "r"(w), "l"(d)); out[(row++) * 128 + i] = r;

// To floating point from 64-bit words d, whose low half is w.
extern "C" __global__ void from_integer(const uint64_t *in, uint32_t *out) {
    const uint32_t i = threadIdx.x;
    const uint64_t d = in[i];
    const uint32_t w = static_cast<uint32_t>(d);
    uint32_t r, row = 0;
    INT_ROW("cvt.rn.f32.s32 %0, %1;")
    INT_ROW("cvt.rz.f32.s32 %0, %1;")
    INT_ROW("cvt.rm.f32.s32 %0, %1;")
    INT_ROW("cvt.rp.f32.u32 %0, %1;")
    INT_ROW("cvt.rn.f32.u32 %0, %1;")
    INT_ROW("cvt.rn.f32.s64 %0, %2;")
    INT_ROW("cvt.rz.f32.u64 %0, %2;")
    INT_ROW("{.reg .b16 h; cvt.rn.f16.s32 h, %1; cvt.u32.u16 %0, h;}")
    INT_ROW("{.reg .b16 h; cvt.rz.f16.u32 h, %1; cvt.u32.u16 %0, h;}")
    INT_ROW("{.reg .b16 h, s; cvt.u16.u32 s, %1; cvt.rn.f16.s16 h, s; cvt.u32.u16 %0, h;}")
    INT_ROW("{.reg .b16 h; cvt.rn.bf16.s32 h, %1; cvt.u32.u16 %0, h;}")
    INT_ROW("{.reg .f64 f; cvt.rn.f64.s64 f, %2; mov.b64 {%0, _}, f;}")
    INT_ROW("{.reg .f64 f; cvt.rp.f64.u64 f, %2; mov.b64 {%0, _}, f;}")
    INT_ROW("{.reg .f64 f; cvt.rn.f64.u32 f, %1; mov.b64 {_, %0}, f;}")
}

#define PAIR_ROW(text) asm volatile(text : "=r"(r) : "r"(w)); out[(row++) * 128 + i] = r;

// From 16-bit and 8-bit formats: the low half (or its two bytes) of each word.
extern "C" __global__ void from_narrow(const uint32_t *in, uint32_t *out) {
    const uint32_t i = threadIdx.x, w = in[i];
    uint32_t r, row = 0;
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.f32.f16 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.f32.bf16 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rni.s32.f16 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rzi.u32.f16 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rmi.s16.f16 h, h; cvt.u32.u16 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rzi.s32.bf16 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; .reg .f64 d; mov.b32 {h, n}, %1; cvt.f64.f16 d, h; mov.b64 {_, %0}, d;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rn.f16x2.e5m2x2 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rn.relu.f16x2.e4m3x2 %0, h;}")
    PAIR_ROW("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f16x2 h, %1; cvt.u32.u16 %0, h;}")
    PAIR_ROW("{.reg .b16 h; cvt.rn.satfinite.e5m2x2.f16x2 h, %1; cvt.u32.u16 %0, h;}")
    PAIR_ROW("{.reg .b16 h; cvt.rn.satfinite.relu.e5m2x2.f16x2 h, %1; cvt.u32.u16 %0, h;}")
    PAIR_ROW("{.reg .b16 h, n; mov.b32 {h, n}, %1; cvt.rn.bf16.f16 h, h; cvt.u32.u16 %0, h;}")
}

// From f64, 64-bit results: out [9, 128].
extern "C" __global__ void from_double(const double *in, uint64_t *out) {
    const uint32_t i = threadIdx.x;
    const double x = in[i];
    uint64_t r;
    uint32_t row = 0;
#define WIDE_ROW(text) asm volatile(text : "=l"(r) : "d"(x)); out[(row++) * 128 + i] = r;
    WIDE_ROW("cvt.rni.s64.f64 %0, %1;")
    WIDE_ROW("cvt.rzi.u64.f64 %0, %1;")
    WIDE_ROW("{.reg .s32 w; cvt.rmi.s32.f64 w, %1; cvt.s64.s32 %0, w;}")
    WIDE_ROW("{.reg .u32 w; cvt.rpi.u32.f64 w, %1; cvt.u64.u32 %0, w;}")
    WIDE_ROW("{.reg .f32 w; .reg .b32 b; cvt.rn.f32.f64 w, %1; mov.b32 b, w; cvt.u64.u32 %0, b;}")
    WIDE_ROW("{.reg .f32 w; .reg .b32 b; cvt.rn.ftz.f32.f64 w, %1; mov.b32 b, w; cvt.u64.u32 %0, b;}")
    WIDE_ROW("{.reg .f32 w; .reg .b32 b; cvt.rm.f32.f64 w, %1; mov.b32 b, w; cvt.u64.u32 %0, b;}")
    WIDE_ROW("{.reg .b16 h; cvt.rn.f16.f64 h, %1; cvt.u64.u16 %0, h;}")
    WIDE_ROW("{.reg .s16 h; cvt.rni.s16.f64 h, %1; cvt.s64.s16 %0, h;}")
}
