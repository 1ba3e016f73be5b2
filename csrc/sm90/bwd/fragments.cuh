// What both backward kernels do with fragments: probabilities, packing, rows of results.
//
// Fragment of [64, N] over the 128 threads of a warpgroup, as ptx/wgmma.cuh has it: x[4 j + 2 h + i] of thread t is
// element (16 (t / 32) + 8 h + (t % 32) / 4, 8 j + 2 (t % 4) + i).
#pragma once

#include <cstdint>

#include "../../common/fragments.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/warp.cuh"
#include "traits.cuh"

namespace vsa::sm90::bwd {

// Zeros the rows of a [64, D] operand from `size` on, by one warpgroup; products need a fence after it. What stands in
// rows that are no keys may be anything, and 0 * NaN is NaN. The swizzle permutes within rows only.
template <int kBoxes>
__device__ __forceinline__ void clear_tile_rows(uint8_t* tile, int size, int thread) {
  constexpr int kRowBytes = kBoxColumns * kElementBytes;
  constexpr int kStride = kWarpgroup * sizeof(uint4);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    for (int at = size * kRowBytes + thread * int{sizeof(uint4)}; at < kBoxBytes; at += kStride) {
      *reinterpret_cast<uint4*>(tile + box * kBoxBytes + at) = uint4{0, 0, 0, 0};
    }
  }
}

// Writes rows of a gradient [64, D] of T, times `scale`; rows from `size` on are zeros.
template <typename T, int kHeadDim>
__device__ __forceinline__ void store_rows(T* rows, const float (&values)[kHeadDim / 2], float scale, int size,
                                           int thread) {
  const int lane = thread % kWarp;
  const int quad = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = thread / kWarp * 16 + 8 * h + lane / 4;
#pragma unroll
    for (int m = 0; m < kHeadDim / 32; ++m) {
      uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = 4 * (4 * m + n) + 2 * h;
        // Selected, not multiplied: what no key contributed to may be NaN.
        x[n] = row < size ? pack_pair<T>(values[at] * scale, values[at + 1] * scale) : 0;
      }
      transpose_quad(x, lane);
      *reinterpret_cast<uint4*>(rows + row * kHeadDim + (4 * m + quad) * 8) = uint4{x[0], x[1], x[2], x[3]};
    }
  }
}

// The A fragments of a row block, by one warpgroup.
template <int kHeadDim>
__device__ __forceinline__ void load_fragments(uint32_t (&fragments)[kHeadDim / kDepth][4], const uint8_t* tile,
                                               int thread) {
  const int lane = thread % kWarp;
  // Of 16 columns, matrix 2 c + h holds rows 8 h and up, columns 8 c and up.
  const int row = thread / kWarp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const uint8_t* start = tile + row * kBoxColumns * kElementBytes;
  constexpr int kStepsOfBox = kBoxColumns / kDepth;
#pragma unroll
  for (int k = 0; k < kHeadDim / kDepth; ++k) {
    const int chunk = (2 * (k % kStepsOfBox) + lane / 16) ^ (lane % 8);
    ptx::load_matrices(fragments[k], start + k / kStepsOfBox * kBoxBytes + chunk * 16);
  }
}

}  // namespace vsa::sm90::bwd
