// The postprocess kernel of the sm_100a backward: a block of kPostprocessThreads per q block.
//
//   gAccumulator [64 * D] fp32 in drain order --> sTile, as it stands --> times sm_scale, bf16, gDq [64, D] by rows
//
// `Order::at(token, column)` is the place in the accumulator. A warp writes 8 tokens by 64 bytes of a row; every 128
// bytes of sTile are 16 bytes further, so that in the order of accumulator_order.h the 32 words it reads at a time are
// in 32 banks. Another order is right as well. Bound by memory: 6 bytes an element.
#pragma once

#include <cstdint>

#include "postprocess.h"

namespace vsa::sm100 {

constexpr int kPostprocessThreads = 256;

template <typename Order>
struct PostprocessTraits {
  static constexpr int kElements = Order::kTokens * Order::kColumns;
  static constexpr int kRunElements = 32;  // between gaps
  static constexpr int kGapElements = 4;
  static constexpr int kSharedElements = kElements + kElements / kRunElements * kGapElements;
  static_assert(kSharedElements * sizeof(float) <= 48 * 1024, "static shared memory ends there");
  static constexpr int kVector = 8;  // columns that a thread writes at a time, 16 bytes
  // Of a warp at a time.
  static constexpr int kWarpVectors = 4, kWarpTokens = 8;
  static constexpr int kWarpColumns = kWarpVectors * kVector;
  __device__ __forceinline__ static int padded(int element) { return element + element / kRunElements * kGapElements; }
};

__device__ __forceinline__ uint32_t packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename Order>
__global__ void __launch_bounds__(kPostprocessThreads)
    postprocess_kernel(const __grid_constant__ PostprocessParams params) {
  using Traits = PostprocessTraits<Order>;
  __shared__ alignas(16) float sTile[Traits::kSharedElements];
  const int64_t first = int64_t{blockIdx.x} * Traits::kElements;
  const float4* gAccumulator = reinterpret_cast<const float4*>(params.dq_accum + first);
#pragma unroll
  for (int i = threadIdx.x; i < Traits::kElements / 4; i += kPostprocessThreads) {
    *reinterpret_cast<float4*>(&sTile[Traits::padded(4 * i)]) = gAccumulator[i];
  }
  __syncthreads();
  constexpr int kPieces = Order::kColumns / Traits::kWarpColumns * (Order::kTokens / Traits::kWarpTokens);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int piece = threadIdx.x / 32; piece < kPieces; piece += kPostprocessThreads / 32) {
    constexpr int kPiecesOfRow = Order::kColumns / Traits::kWarpColumns;
    const int token = piece / kPiecesOfRow * Traits::kWarpTokens + lane / Traits::kWarpVectors;
    const int column = piece % kPiecesOfRow * Traits::kWarpColumns + lane % Traits::kWarpVectors * Traits::kVector;
    float values[Traits::kVector];
#pragma unroll
    for (int j = 0; j < Traits::kVector; ++j) {
      values[j] = sTile[Traits::padded(Order::at(token, column + j))] * params.sm_scale;
    }
    const uint4 row{packed(values[0], values[1]), packed(values[2], values[3]), packed(values[4], values[5]),
                    packed(values[6], values[7])};
    *reinterpret_cast<uint4*>(params.dq + first + token * Order::kColumns + column) = row;
  }
}

}  // namespace vsa::sm100
