// What the registration calls of the kernels around the fused backward.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../params.h"

namespace vsa::sm90 {

struct DeltaParams {
  const void* out;          // [B, H, S, D] T, dense
  const void* dout;         // [B, H, S, D] T at dout_strides, rows dense, multiples of 16 bytes
  int64_t dout_strides[3];  // elements between batches, heads and tokens
  const float* dlse;        // [B, H, S], gradient of lse_log2, or nullptr
  int64_t dlse_strides[3];
  float* delta;  // [B, H, S]
  int B, H, S;
};

// Fills params.delta. Throws on any CUDA error, as the other launchers do.
void launch_delta(const DeltaParams& params, Dtype dtype, int head_dim, cudaStream_t stream);

// dq [blocks, 64, D] T from the accumulator [blocks, 64 * D] of the backward.
void launch_finish_dq(const float* accumulator, void* dq, float scale, int64_t blocks, Dtype dtype, int head_dim,
                      cudaStream_t stream);

}  // namespace vsa::sm90
