// What comes before the sm_100a backward, and what its launcher does first. Plain CUDA: also for sm_90a. Letters as in
// ../params.h, with as many heads of keys as of queries.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace vsa::sm100 {

// Delta, Q^T and dO^T: in compiled graphs generated code writes them.
struct TransposeParams {
  // [B, H, Sq, D] at strides (elements between batches, heads and tokens), rows dense, all multiples of 16 bytes.
  const __nv_bfloat16 *q, *dout, *out;
  int64_t q_strides[3], dout_strides[3], out_strides[3];
  const float* dlse;                              // [B, H, Sq], of lse_log2; nullptr where it is zero
  __nv_bfloat16 *q_transposed, *dout_transposed;  // [H * D, B * Sq], token contiguous
  float* delta;                                   // [B, H, Sq], rowsum(out * dout) - dlse / ln 2
  int B, H, Nq;
};

// Zeros in what the main kernel only adds to, and in what it never visits.
struct ClearParams {
  float* dq_accum;         // [B, H, Sq, D] in any order; nullptr where dq is not wanted
  __nv_bfloat16 *dk, *dv;  // [B, H, Skv, D]: rows of kv blocks that nobody lists; nullptr where the kernel does that
  const int* q_offsets;    // [B, H, Nkv + 1], read only with dk and dv
  int B, H, Nq, Nkv;
};

// Both launch on `stream` of the current device and throw on any CUDA error. Head dim 128, blocks of 64.
void launch_transpose(const TransposeParams& params, cudaStream_t stream);
void launch_clear(const ClearParams& params, cudaStream_t stream);

}  // namespace vsa::sm100
