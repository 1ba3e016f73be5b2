// wgmma with both operands in shared memory, elements other than 16 bits: fp8 of both formats, tf32, 8-bit integers.
// These are K-major only; fp8 and tf32 take scale-a and scale-b, integers take no immediate.
#include "wgmma.cuh"

WGMMA_SS(e4m3_n64, "m64n64k32", "f32.e4m3.e4m3", float, float, "+f", 32, 32, 33, 34, ", 1, 1")
WGMMA_SS(e5m2_e4m3_n8, "m64n8k32", "f32.e5m2.e4m3", float, float, "+f", 4, 4, 5, 6, ", 1, -1")
WGMMA_SS(e4m3_e5m2_n16_half, "m64n16k32", "f16.e4m3.e5m2", uint32_t, uint16_t, "+r", 4, 4, 5, 6, ", 1, 1")
WGMMA_SS(tf32_n16, "m64n16k8", "f32.tf32.tf32", float, float, "+f", 8, 8, 9, 10, ", 1, 1")
WGMMA_SS(s8_n32, "m64n32k32", "s32.s8.s8", int, int, "+r", 16, 16, 17, 18, "")
WGMMA_SS(u8_s8_n8_satfinite, "m64n8k32", "s32.u8.s8.satfinite", int, int, "+r", 4, 4, 5, 6, "")
