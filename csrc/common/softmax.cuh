// Online softmax in base 2 over score fragments of warpgroup products: a thread holds kColumns / 4 neighbouring pairs
// of two rows, and the four lanes of a quad share the rows (../ptx/wgmma.cuh).
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "fragments.cuh"

namespace vsa {

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

// Of a thread's scores, by row.
struct Maxima {
  float row[2];
  __device__ __forceinline__ Maxima with(Maxima other) const {
    return {{fmaxf(row[0], other.row[0]), fmaxf(row[1], other.row[1])}};
  }
};

template <int kValues>
__device__ __forceinline__ Maxima thread_maxima(const float (&rS)[kValues]) {
  constexpr int kChains = 8;  // of instructions that wait for each other, four a row
  float chains[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) chains[i] = rS[i];
#pragma unroll
  for (int i = kChains; i < kValues; ++i) chains[i % kChains] = fmaxf(chains[i % kChains], rS[i]);
  return Maxima{{fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3])}}.with(
      {{fmaxf(chains[4], chains[5]), fmaxf(chains[6], chains[7])}});
}

// The state of this thread's two rows: values 4 j + {0, 1} of a fragment belong to row 0, 4 j + {2, 3} to row 1. A step
// is `raise` with its maxima, `exponentiate` and `absorb`.
struct OnlineSoftmax {
  // The subtracted maximum may lag behind the true one by this factor of two in the probabilities: they stay below 256,
  // far from the limits of fp16 and bf16, and most steps need no rescaling of the accumulator at all.
  static constexpr float kLag = 8.0f;

  float peak[2] = {-INFINITY, -INFINITY};  // subtracted maximum of the scores, unscaled
  float sum[2] = {0.0f, 0.0f};             // of this thread's probabilities
  float correction[2] = {1.0f, 1.0f};      // of the last `raise`: what earlier results are to be multiplied by
  float fresh[2];                          // sums of its probabilities

  // True, in the whole warp, if what was accumulated has to be corrected.
  __device__ __forceinline__ bool raise(Maxima scores, float scale_log2) {
    float (&highest)[2] = scores.row;
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
        peak[row] = higher;
      }
    }
    return corrected;
  }

  // Scores to probabilities.
  template <int kTiles, int kValues>
  __device__ __forceinline__ void exponentiate(float (&rS)[kTiles][kValues], float scale_log2) {
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
    fresh[0] = partial[0] + partial[1];
    fresh[1] = partial[2] + partial[3];
  }

  __device__ __forceinline__ void absorb(bool corrected) {
    if (corrected) {
#pragma unroll
      for (int row = 0; row < 2; ++row) sum[row] *= correction[row];
    }
    sum[0] += fresh[0];
    sum[1] += fresh[1];
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
