// What comes after the sm_100a backward in eager: dq out of its accumulator. In compiled graphs generated code does it.
// Plain CUDA: also for sm_90a.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace vsa::sm100 {

struct PostprocessParams {
  const float* dq_accum;  // [B * H, Nq, 64 * D], unscaled, each block in the order of accumulator_order.h
  __nv_bfloat16* dq;      // [B * H, Sq, D]
  int rows, Nq;           // rows: B * H
  float sm_scale;
};

// Launches on `stream` of the current device; head dim 128, blocks of 64. Throws on any CUDA error.
void launch_postprocess(const PostprocessParams& params, cudaStream_t stream);

}  // namespace vsa::sm100
