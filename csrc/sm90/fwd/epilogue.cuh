// The end of a q tile: O divided by the sums, in T, and lse.
#pragma once

#include "../../common/softmax.cuh"
#include "traits.cuh"

namespace vsa::sm90::fwd {

// rO is a fragment of products with D columns. Four neighbouring words of a row are gathered in one lane, so that a
// quad writes 64 bytes of a row at a time.
template <typename Traits>
__device__ __forceinline__ void store_tile(const AttentionForwardParams& params, float (&rO)[Traits::kHeadDim / 2],
                                           const OnlineSoftmax& softmax, int64_t first_row, int thread) {
  using T = typename Traits::T;
  const int lane = thread % kWarp;
  const int row = thread / kWarp * 16 + lane / 4;
  T* out = static_cast<T*>(params.out) + (first_row + row) * Traits::kHeadDim + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = softmax.inverse_sum(half);
#pragma unroll
    for (int column = 0; column < Traits::kHeadDim; column += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = rO + (column / 8 + i) * 4 + half * 2;
        words[i] = pack_pair<T>(pair[0] * inverse, pair[1] * inverse);
      }
      transpose_quad(words, lane);
      *reinterpret_cast<uint4*>(out + half * 8 * Traits::kHeadDim + column) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }
  if (params.lse_log2 != nullptr && lane % 4 < 2) {
    const int half = lane % 4;
    const float low = softmax.lse_log2(0, params.sm_scale_log2);
    const float high = softmax.lse_log2(1, params.sm_scale_log2);
    params.lse_log2[first_row + row + half * 8] = half == 0 ? low : high;
  }
}

}  // namespace vsa::sm90::fwd
