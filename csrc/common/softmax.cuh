// Online softmax in base 2 over score fragments of warpgroup products: a thread holds kColumns / 4 neighbouring pairs
// of two rows, and the four lanes of a quad share the rows (../ptx/wgmma.cuh).
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

// Columns from `size` on get -inf.
template <int kValues>
__device__ __forceinline__ void mask_columns(float (&rS)[kValues], int size, int lane) {
  const int first = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int column = i / 4 * 8 + i % 2;
    if (first + column >= size) rS[i] = -INFINITY;
  }
}

// The state of this thread's two rows: values 4 j + {0, 1} of a fragment belong to row 0, 4 j + {2, 3} to row 1.
struct OnlineSoftmax {
  // The subtracted maximum may lag behind the true one by this factor of two in the probabilities: they stay below 256,
  // far from the limits of fp16 and bf16, and most steps need no rescaling of the accumulator at all.
  static constexpr float kLag = 8.0f;

  float peak[2] = {-INFINITY, -INFINITY};  // subtracted maximum of the scores, unscaled
  float sum[2] = {0.0f, 0.0f};             // of this thread's probabilities
  float correction[2] = {1.0f, 1.0f};      // of the last update: what earlier results are to be multiplied by

  // Turns scores of kTiles fragments into probabilities. True, in the whole warp, if what was accumulated has to be
  // corrected.
  template <int kTiles, int kValues>
  __device__ __forceinline__ bool update(float (&rS)[kTiles][kValues], float scale_log2) {
    float highest[2];
    thread_maxima(rS, highest);
    // Whether peaks lag too far behind needs no maximum of the whole row: any lane may say so.
    const bool behind = fmaxf(highest[0] - peak[0], highest[1] - peak[1]) * scale_log2 > kLag;
    const bool corrected = __any_sync(ptx::kWholeWarp, behind);
    if (corrected) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        highest[row] = fmaxf(highest[row], __shfl_xor_sync(ptx::kWholeWarp, highest[row], 1));
        highest[row] = fmaxf(highest[row], __shfl_xor_sync(ptx::kWholeWarp, highest[row], 2));
        const float higher = fmaxf(peak[row], highest[row]);
        // A row that has no finite score yet has accumulated zeros, and -inf + inf is NaN.
        correction[row] = higher == -INFINITY ? 1.0f : exp2_approximate((peak[row] - higher) * scale_log2);
        sum[row] *= correction[row];
        peak[row] = higher;
      }
    }
    float shift[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) shift[row] = peak[row] == -INFINITY ? 0.0f : peak[row] * scale_log2;
    // Two chains of additions a row: one would be as long as the exponentials take.
    float partial[4] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        rS[tile][i] = exp2_approximate(fmaf(rS[tile][i], scale_log2, -shift[i / 2 % 2]));
        partial[i % 4] += rS[tile][i];
      }
    }
    sum[0] += partial[0] + partial[1];
    sum[1] += partial[2] + partial[3];
    return corrected;
  }

  // Of this thread's scores, by row.
  template <int kTiles, int kValues>
  __device__ __forceinline__ static void thread_maxima(const float (&rS)[kTiles][kValues], float (&highest)[2]) {
    float chains[4] = {rS[0][0], rS[0][1], rS[0][2], rS[0][3]};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = tile == 0 ? 4 : 0; i < kValues; ++i) chains[i % 4] = fmaxf(chains[i % 4], rS[tile][i]);
    }
    highest[0] = fmaxf(chains[0], chains[1]);
    highest[1] = fmaxf(chains[2], chains[3]);
  }

  template <int kValues>
  __device__ __forceinline__ void correct(float (&rO)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) rO[i] *= correction[i / 2 % 2];
  }

  // Sums over the whole rows; once, after the last update.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(ptx::kWholeWarp, sum[row], 1);
      sum[row] += __shfl_xor_sync(ptx::kWholeWarp, sum[row], 2);
    }
  }

  __device__ __forceinline__ float inverse_sum(int row) const { return sum[row] == 0.0f ? 0.0f : 1.0f / sum[row]; }

  // Of a row without a key -inf.
  __device__ __forceinline__ float lse_log2(int row, float scale_log2) const {
    return sum[row] == 0.0f ? -INFINITY : fmaf(peak[row], scale_log2, log2_approximate(sum[row]));
  }
};

// Probabilities as operand A of products: registers of step t cover columns 16 t .. 16 t + 15.
template <typename T, int kValues>
__device__ __forceinline__ void pack_operand(uint32_t (&rP)[kValues / 8][4], const float (&rS)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) rP[i / 4][i % 4] = pack_pair<T>(rS[2 * i], rS[2 * i + 1]);
}

}  // namespace vsa
