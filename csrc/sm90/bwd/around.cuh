// What stands around the fused backward where no compiler writes it: delta before it, the end of dq after it.
//
//   out [B, H, S, D] dense, dout [B, H, S, D] strided, dlse [B, H, S] or none   ->  delta [B, H, S] fp32
//   accumulator [B, H, N, 64 * D] fp32, each block [4 a][D / 8 b][8 c][4 d][2 e][2 f]
//     ->  dq [B, H, N, 64, D]: token 16 a + 8 e + c, column 8 b + 2 d + f, times the scale
//
// Compiled graphs generate both (vsa_inductor/backends/contract.py); tests compare the two bit for bit where the
// arithmetic is the same.
#pragma once

#include <cstdint>

#include "../../common/fragments.cuh"
#include "around.h"

namespace vsa::sm90::bwd {

constexpr int kAroundThreads = 256;
constexpr int kChunk = 8;  // elements of 16 bytes

// A row for every kHeadDim / kChunk lanes; rows of all heads in a line.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAroundThreads) delta_kernel(const __grid_constant__ DeltaParams params) {
  constexpr int kLanes = kHeadDim / kChunk;
  constexpr float kInverseLn2 = 1.4426950408889634f;
  const int64_t row = (int64_t{blockIdx.x} * kAroundThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool inside = row < int64_t{params.B} * params.H * params.S;
  const int64_t of_head = inside ? row / params.S : 0;
  const int64_t token = inside ? row - of_head * params.S : 0;
  const int64_t batch = of_head / params.H, head = of_head % params.H;
  float sum = 0.0f;
  if (inside) {
    const uint4 a = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.out) + row * kHeadDim + lane * kChunk);
    const T* dout = static_cast<const T*>(params.dout) + batch * params.dout_strides[0] +
                    head * params.dout_strides[1] + token * params.dout_strides[2];
    const uint4 b = *reinterpret_cast<const uint4*>(dout + lane * kChunk);
    const uint32_t x[] = {a.x, a.y, a.z, a.w}, y[] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float2 left = unpack_pair<T>(x[i]), right = unpack_pair<T>(y[i]);
      sum = fmaf(left.y, right.y, fmaf(left.x, right.x, sum));
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(ptx::kWholeWarp, sum, distance);
  }
  if (!inside || lane != 0) return;
  if (params.dlse != nullptr) {
    const float* dlse = params.dlse + batch * params.dlse_strides[0] + head * params.dlse_strides[1];
    sum -= dlse[token * params.dlse_strides[2]] * kInverseLn2;
  }
  params.delta[row] = sum;
}

// A thread makes 8 neighbouring columns of two rows. Neighbouring threads are neighbours in c: what a warp reads is one
// piece, what it writes are pieces of 64 bytes.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAroundThreads)
    finish_dq_kernel(const float* accumulator, T* dq, float scale, int64_t blocks) {
  constexpr int kThreadsPerBlock = 4 * (kHeadDim / 8) * 8;
  const int64_t thread = int64_t{blockIdx.x} * kAroundThreads + threadIdx.x;
  const int64_t block = thread / kThreadsPerBlock;
  if (block >= blocks) return;
  const int place = static_cast<int>(thread % kThreadsPerBlock);
  const int c = place % 8, b = place / 8 % (kHeadDim / 8), a = place / kHeadDim;
  const float4* read = reinterpret_cast<const float4*>(accumulator) + thread * 4;
  uint4 rows[2];
  uint32_t* first = &rows[0].x;
  uint32_t* second = &rows[1].x;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const float4 x = read[d];
    first[d] = pack_pair<T>(x.x * scale, x.y * scale);
    second[d] = pack_pair<T>(x.z * scale, x.w * scale);
  }
  T* out = dq + block * (64 * kHeadDim) + (16 * a + c) * kHeadDim + 8 * b;
  *reinterpret_cast<uint4*>(out) = rows[0];
  *reinterpret_cast<uint4*>(out + 8 * kHeadDim) = rows[1];
}

}  // namespace vsa::sm90::bwd
