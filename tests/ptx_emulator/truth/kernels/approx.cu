// Approximate functions, compared by tolerance: one output row per instruction in the order written.
#include "common.cuh"

#define ROW(text) asm volatile(text : "=f"(r) : "f"(x), "f"(y)); out[(row++) * 64 + i] = r;

extern "C" __global__ void singles(const float *in, float *out) {
    const uint32_t i = threadIdx.x;
    const float x = in[i], y = in[64 + i];
    float r;
    uint32_t row = 0;
    ROW("ex2.approx.f32 %0, %1;")
    ROW("ex2.approx.ftz.f32 %0, %1;")
    ROW("lg2.approx.f32 %0, %2;")
    ROW("lg2.approx.ftz.f32 %0, %2;")
    ROW("sin.approx.f32 %0, %1;")
    ROW("cos.approx.ftz.f32 %0, %1;")
    ROW("rcp.approx.f32 %0, %1;")
    ROW("rcp.approx.ftz.f32 %0, %1;")
    ROW("rsqrt.approx.f32 %0, %2;")
    ROW("rsqrt.approx.ftz.f32 %0, %2;")
    ROW("sqrt.approx.f32 %0, %2;")
    ROW("sqrt.approx.ftz.f32 %0, %2;")
    ROW("tanh.approx.f32 %0, %1;")
    ROW("div.approx.f32 %0, %1, %2;")
    ROW("div.full.f32 %0, %1, %2;")
    ROW("div.approx.ftz.f32 %0, %1, %2;")
}

#define PACKED(text) asm volatile(text : "=r"(r) : "r"(x)); out[(row++) * 64 + i] = r;

extern "C" __global__ void packed(const uint32_t *halves, const uint32_t *brains, uint32_t *out) {
    const uint32_t i = threadIdx.x;
    uint32_t x = halves[i], r, row = 0;
    PACKED("ex2.approx.f16x2 %0, %1;")
    PACKED("tanh.approx.f16x2 %0, %1;")
    x = brains[i];
    PACKED("ex2.approx.ftz.bf16x2 %0, %1;")
    PACKED("tanh.approx.bf16x2 %0, %1;")
}

// What the C++ functions compile to: expf, logf, sinf of small arguments, and divisions.
extern "C" __global__ void library(const float *in, float *out) {
    const uint32_t i = threadIdx.x;
    const float x = in[i], y = in[64 + i];
    out[i] = expf(x);
    out[64 + i] = logf(y);
    out[128 + i] = __expf(x) / y;
    out[192 + i] = tanhf(x);
    out[256 + i] = rsqrtf(y) * exp2f(x);
    out[320 + i] = __fdividef(x, y) + erff(x);
}
