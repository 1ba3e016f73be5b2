// mma.sync: the host lays the fragments out, [registers, 32 lanes] of 32-bit words for A, B, C and D.
#include "common.cuh"

#define IN(v, i) "r"(v[(i) * 32 + lane])
#define IN1(v) IN(v, 0)
#define IN2(v) IN(v, 0), IN(v, 1)
#define IN4(v) IN(v, 0), IN(v, 1), IN(v, 2), IN(v, 3)
#define OUT2 "=r"(d[lane]), "=r"(d[32 + lane])
#define OUT4 "=r"(d[lane]), "=r"(d[32 + lane]), "=r"(d[64 + lane]), "=r"(d[96 + lane])

#define MMA(name, instruction, operands, outputs, ...)                                                          \
    extern "C" __global__ void name(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *d) {     \
        const int lane = threadIdx.x;                                                                           \
        asm volatile("mma.sync.aligned." instruction " " operands ";" : outputs : __VA_ARGS__);                 \
    }

// Registers of D, A, B, C.
#define D4A4B2C4 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13}"
#define D4A2B1C4 "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10}"
#define D2A4B2C2 "{%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9}"
#define D2A2B1C2 "{%0,%1}, {%2,%3}, {%4}, {%5,%6}"
#define D2A1B1C2 "{%0,%1}, {%2}, {%3}, {%4,%5}"

MMA(f16_k16, "m16n8k16.row.col.f32.f16.f16.f32", D4A4B2C4, OUT4, IN4(a), IN2(b), IN4(c))
MMA(bf16_k16, "m16n8k16.row.col.f32.bf16.bf16.f32", D4A4B2C4, OUT4, IN4(a), IN2(b), IN4(c))
MMA(f16_k8, "m16n8k8.row.col.f32.f16.f16.f32", D4A2B1C4, OUT4, IN2(a), IN1(b), IN4(c))
MMA(bf16_k8, "m16n8k8.row.col.f32.bf16.bf16.f32", D4A2B1C4, OUT4, IN2(a), IN1(b), IN4(c))
MMA(f16_k16_half, "m16n8k16.row.col.f16.f16.f16.f16", D2A4B2C2, OUT2, IN4(a), IN2(b), IN2(c))
MMA(f16_k8_half, "m16n8k8.row.col.f16.f16.f16.f16", D2A2B1C2, OUT2, IN2(a), IN1(b), IN2(c))
MMA(tf32_k8, "m16n8k8.row.col.f32.tf32.tf32.f32", D4A4B2C4, OUT4, IN4(a), IN2(b), IN4(c))
MMA(tf32_k4, "m16n8k4.row.col.f32.tf32.tf32.f32", D4A2B1C4, OUT4, IN2(a), IN1(b), IN4(c))
MMA(e4m3_k32, "m16n8k32.row.col.f32.e4m3.e4m3.f32", D4A4B2C4, OUT4, IN4(a), IN2(b), IN4(c))
MMA(e5m2_e4m3_k32, "m16n8k32.row.col.f32.e5m2.e4m3.f32", D4A4B2C4, OUT4, IN4(a), IN2(b), IN4(c))
MMA(s8_k32, "m16n8k32.row.col.s32.s8.s8.s32", D4A4B2C4, OUT4, IN4(a), IN2(b), IN4(c))
MMA(u8_s8_k32_satfinite, "m16n8k32.row.col.satfinite.s32.u8.s8.s32", D4A4B2C4, OUT4, IN4(a), IN2(b), IN4(c))
MMA(s8_k16, "m16n8k16.row.col.s32.s8.s8.s32", D4A2B1C4, OUT4, IN2(a), IN1(b), IN4(c))
MMA(s8_m8n8k16, "m8n8k16.row.col.s32.s8.s8.s32", D2A1B1C2, OUT2, IN1(a), IN1(b), IN2(c))

// Double precision: [registers, 32 lanes] of 64-bit words.
extern "C" __global__ void f64_m8n8k4(const double *a, const double *b, const double *c, double *d) {
    const int lane = threadIdx.x;
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%4,%5};"
                 : "=d"(d[lane]), "=d"(d[32 + lane])
                 : "d"(a[lane]), "d"(b[lane]), "d"(c[lane]), "d"(c[32 + lane]));
}
