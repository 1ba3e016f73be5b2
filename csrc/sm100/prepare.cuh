// The preprocess kernels of the sm_100a backward.
//
//   transpose_kernel   a block of kPrepareThreads per q block (64 tokens of one head):
//     gOut, gDout [64, D] --> gDelta [64] = rowsum(out * dout) - dlse / ln 2
//     gQ, gDout [64, D] --> sTile [64][D] --> gQ^T, gDout^T [D, 64]: rows of 128 bytes, B * Sq elements apart
//   clear_kernel       zeros: the accumulator, 16 bytes a thread and turn; then dk and dv of a kv block without a list,
//                      a block each
//
// sTile: 16-byte columns of a row are permuted by the row's number of eight tokens (`at`). Written along rows and read
// along tokens, both without bank conflicts: of a warp that reads, eight lanes are eight tokens apart, four are
// neighbouring pairs of columns.
//
// Bound by memory: 5 tensors of 2 bytes an element; 40 registers and 32 KB let six blocks share a multiprocessor.
#pragma once

#include "prepare.h"

namespace vsa::sm100 {

constexpr int kPrepareThreads = 256;
constexpr int kPrepareBlock = 64;                                      // tokens: of a q block, of a kv block
constexpr int kVector = 16 / static_cast<int>(sizeof(__nv_bfloat16));  // elements of the widest load
constexpr float kInverseLn2 = 1.4426950408889634f;

template <int kHeadDim>
struct TransposeTraits {
  static constexpr int kVectors = kHeadDim / kVector;       // of a row
  static constexpr int kRows = kPrepareThreads / kVectors;  // read at a time
  static constexpr int kPairs = kHeadDim / 2;               // 4-byte words of a row
  static constexpr int kRuns = kPrepareBlock / kVector;     // 16-byte runs of tokens in a row of the transpose
  static constexpr int kLanePairs = 32 / kRuns;             // pairs of columns that a warp reads at a time
  static_assert(kVectors % kRuns == 0, "the permutation exchanges a row's columns in groups of kRuns");
  static_assert(kPrepareBlock % kRows == 0 && kVectors <= 32, "rows are summed by lanes of one warp");
  // The word of a token's pair of columns.
  __device__ __forceinline__ static int at(int token, int pair) {
    const int vector = pair / 4 ^ token / kVector % kRuns;
    return token * kPairs + vector * 4 + pair % 4;
  }
};

__device__ __forceinline__ float dot(uint32_t x, uint32_t y) {
  const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x));
  const float2 b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(y));
  return a.x * b.x + a.y * b.y;
}

__device__ __forceinline__ float dot(uint4 x, uint4 y) {
  return dot(x.x, y.x) + dot(x.y, y.y) + (dot(x.z, y.z) + dot(x.w, y.w));
}

__device__ __forceinline__ int64_t offset_of(const int64_t (&strides)[3], int b, int h, int token) {
  return b * strides[0] + h * strides[1] + token * strides[2];
}

// [64, kHeadDim] in shared memory -> [kHeadDim, 64] at `pitch` elements between rows.
template <int kHeadDim>
__device__ __forceinline__ void store_transposed(const uint32_t* sTile, __nv_bfloat16* gRows, int64_t pitch) {
  using Traits = TransposeTraits<kHeadDim>;
  const int run = threadIdx.x % Traits::kRuns;
  // Upper and lower half of a pair of words, so that a word holds two tokens of one column.
  constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;
#pragma unroll
  for (int first = 0; first < Traits::kPairs; first += kPrepareThreads / Traits::kRuns) {
    const int pair = first + threadIdx.x / Traits::kRuns;
    uint32_t words[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) words[i] = sTile[Traits::at(run * kVector + i, pair)];
    uint4 low, high;
    low.x = __byte_perm(words[0], words[1], kLow), high.x = __byte_perm(words[0], words[1], kHigh);
    low.y = __byte_perm(words[2], words[3], kLow), high.y = __byte_perm(words[2], words[3], kHigh);
    low.z = __byte_perm(words[4], words[5], kLow), high.z = __byte_perm(words[4], words[5], kHigh);
    low.w = __byte_perm(words[6], words[7], kLow), high.w = __byte_perm(words[6], words[7], kHigh);
    __nv_bfloat16* row = gRows + 2 * pair * pitch + run * kVector;
    *reinterpret_cast<uint4*>(row) = low;
    *reinterpret_cast<uint4*>(row + pitch) = high;
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads) transpose_kernel(const __grid_constant__ TransposeParams params) {
  using Traits = TransposeTraits<kHeadDim>;
  __shared__ alignas(16) uint32_t sQ[kPrepareBlock * Traits::kPairs];
  __shared__ alignas(16) uint32_t sDout[kPrepareBlock * Traits::kPairs];
  const int block = blockIdx.x % params.Nq;
  const int row = blockIdx.x / params.Nq;
  const int b = row / params.H, h = row % params.H;
  const int vector = threadIdx.x % Traits::kVectors;
  const int64_t length = int64_t{params.Nq} * kPrepareBlock;
#pragma unroll
  for (int first = 0; first < kPrepareBlock; first += Traits::kRows) {
    const int local = first + threadIdx.x / Traits::kVectors;
    const int token = block * kPrepareBlock + local;
    const auto loaded = [&](const __nv_bfloat16* x, const int64_t (&strides)[3]) {
      return *reinterpret_cast<const uint4*>(x + offset_of(strides, b, h, token) + vector * kVector);
    };
    const uint4 q = loaded(params.q, params.q_strides);
    const uint4 dout = loaded(params.dout, params.dout_strides);
    const uint4 out = loaded(params.out, params.out_strides);
    *reinterpret_cast<uint4*>(&sQ[Traits::at(local, vector * 4)]) = q;
    *reinterpret_cast<uint4*>(&sDout[Traits::at(local, vector * 4)]) = dout;
    float sum = dot(out, dout);
#pragma unroll
    for (int distance = Traits::kVectors / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (vector == 0) {
      const int64_t at = row * length + token;
      params.delta[at] = params.dlse == nullptr ? sum : sum - params.dlse[at] * kInverseLn2;
    }
  }
  __syncthreads();
  const int64_t pitch = params.B * length;
  const int64_t first = int64_t{h} * kHeadDim * pitch + b * length + int64_t{block} * kPrepareBlock;
  store_transposed<kHeadDim>(sQ, params.q_transposed + first, pitch);
  store_transposed<kHeadDim>(sDout, params.dout_transposed + first, pitch);
}

// The first `accumulator_blocks` blocks zero `vectors` times 16 bytes of the accumulator, each other one a kv block.
template <int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads)
    clear_kernel(const __grid_constant__ ClearParams params, int accumulator_blocks, int64_t vectors) {
  const int block = static_cast<int>(blockIdx.x) - accumulator_blocks;
  const uint4 zero{0, 0, 0, 0};
  if (block < 0) {
    const int64_t stride = int64_t{accumulator_blocks} * kPrepareThreads;
    uint4* gAccumulator = reinterpret_cast<uint4*>(params.dq_accum);
    for (int64_t i = int64_t{blockIdx.x} * kPrepareThreads + threadIdx.x; i < vectors; i += stride) {
      gAccumulator[i] = zero;
    }
    return;
  }
  const int* offsets = params.q_offsets + int64_t{block / params.Nkv} * (params.Nkv + 1) + block % params.Nkv;
  if (offsets[0] != offsets[1]) return;
  constexpr int kVectorsOfBlock = kPrepareBlock * kHeadDim / kVector;
  for (__nv_bfloat16* x : {params.dk, params.dv}) {
    uint4* gRows = reinterpret_cast<uint4*>(x) + int64_t{block} * kVectorsOfBlock;
    for (int i = threadIdx.x; i < kVectorsOfBlock; i += kPrepareThreads) gRows[i] = zero;
  }
}

}  // namespace vsa::sm100
