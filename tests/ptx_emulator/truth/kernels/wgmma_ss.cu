// wgmma with both operands in shared memory, 16-bit elements: N from 8 to 256, every major, negation, f16 and f32 D.
#include "wgmma.cuh"

// D in f32. The four immediates: scale-a, scale-b, A major, B major (0 K, 1 MN).
WGMMA_SS(f16_n8, "m64n8k16", "f32.f16.f16", float, float, "+f", 4, 4, 5, 6, ", 1, 1, 0, 0")
WGMMA_SS(bf16_n24, "m64n24k16", "f32.bf16.bf16", float, float, "+f", 12, 12, 13, 14, ", 1, 1, 0, 0")
WGMMA_SS(f16_n128, "m64n128k16", "f32.f16.f16", float, float, "+f", 64, 64, 65, 66, ", 1, 1, 0, 0")
WGMMA_SS(bf16_n256, "m64n256k16", "f32.bf16.bf16", float, float, "+f", 128, 128, 129, 130, ", 1, 1, 0, 0")

WGMMA_SS(bf16_n64, "m64n64k16", "f32.bf16.bf16", float, float, "+f", 32, 32, 33, 34, ", 1, 1, 0, 0")
WGMMA_SS(bf16_n64_b_mn, "m64n64k16", "f32.bf16.bf16", float, float, "+f", 32, 32, 33, 34, ", 1, 1, 0, 1")
WGMMA_SS(bf16_n64_a_mn, "m64n64k16", "f32.bf16.bf16", float, float, "+f", 32, 32, 33, 34, ", 1, 1, 1, 0")
WGMMA_SS(f16_n64_ab_mn, "m64n64k16", "f32.f16.f16", float, float, "+f", 32, 32, 33, 34, ", 1, 1, 1, 1")
WGMMA_SS(bf16_n64_negate_a, "m64n64k16", "f32.bf16.bf16", float, float, "+f", 32, 32, 33, 34, ", -1, 1, 0, 0")
WGMMA_SS(f16_n64_negate_b, "m64n64k16", "f32.f16.f16", float, float, "+f", 32, 32, 33, 34, ", 1, -1, 0, 0")

// D in f16, two columns in a register.
WGMMA_SS(f16_n16_half, "m64n16k16", "f16.f16.f16", uint32_t, uint16_t, "+r", 4, 4, 5, 6, ", 1, 1, 0, 0")
WGMMA_SS(f16_n64_half, "m64n64k16", "f16.f16.f16", uint32_t, uint16_t, "+r", 16, 16, 17, 18, ", 1, 1, 0, 0")
