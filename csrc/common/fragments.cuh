// Values in registers on their way into and out of products: powers, pairs of 16-bit values, rows from quads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/warp.cuh"

namespace vsa {

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values as one register, `low` in its low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The two values of one register, the low half first.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    float2 values;
    asm("{\n"
        ".reg .f16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(packed));
    return values;
  }
}

// Lane i of a quad gives words[j] to lane j and gets the words[i] of the others: words[j] then is lane j's.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = lane & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t given = upper ? words[i] : words[i + distance];
      const uint32_t received = __shfl_xor_sync(ptx::kWholeWarp, given, distance);
      (upper ? words[i] : words[i + distance]) = received;
    }
  }
}

}  // namespace vsa
