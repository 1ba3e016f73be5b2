// What both backward kernels do with fragments: probabilities, packing, rows of results.
//
// Fragment of [64, N] over the 128 threads of a warpgroup, as ptx/wgmma.cuh has it: x[4 j + 2 h + i] of thread t is
// element (16 (t / 32) + 8 h + (t % 32) / 4, 8 j + 2 (t % 4) + i).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../ptx/bulk.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/warp.cuh"
#include "traits.cuh"

namespace vsa::sm90::bwd {

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values rounded to T, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t packed) {
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

// Transposes a 4x4 matrix of words over the four lanes of a quad: lane c has x[m] = M[m][c], and gets x[m] = M[c][m].
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane_of_quad) {
  const bool odd = lane_of_quad & 1;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    const uint32_t other = __shfl_xor_sync(ptx::kWholeWarp, odd ? x[m] : x[m + 1], 1);
    x[m] = odd ? other : x[m];
    x[m + 1] = odd ? x[m + 1] : other;
  }
  const bool high = lane_of_quad & 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint32_t other = __shfl_xor_sync(ptx::kWholeWarp, high ? x[m] : x[m + 2], 2);
    x[m] = high ? other : x[m];
    x[m + 2] = high ? x[m + 2] : other;
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
        x[n] = row < size ? pack<T>(values[at] * scale, values[at + 1] * scale) : 0;
      }
      transpose_quad(x, quad);
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
