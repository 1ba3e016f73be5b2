// What the sm_100a backward kernels are given. Letters as in ../../params.h: B batch, H heads, Nq and Nkv blocks of 64
// tokens, Sq = 64 Nq, Skv = 64 Nkv, M width of the lists, D = 128 head dim. What is no tensor map is contiguous.
//
// A list is valid up to its count; what stands at or past the count is never read. Ids ascend within a list.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

namespace vsa::sm100 {

struct BackwardParams {
  // [B, H, Skv, D] bf16 as maps of dimensions {D, Skv, H, B}, box {64, 64, 1, 1}, 128-byte swizzle.
  CUtensorMap k, v;
  // Q^T and dO^T, [H * D, B * Sq] bf16 as maps of dimensions {B * Sq, H * D}, box {64, 128}, 128-byte swizzle: one box
  // is one q block of one head.
  CUtensorMap q_transposed, dout_transposed;
  const float* lse_log2;      // [B, H, Sq], the forward's; -inf for a row without a key
  const float* delta;         // [B, H, Sq], rowsum(out * dout) - dlse_log2 / ln 2
  const int* kv_indices;      // [B, H, Nq, M]; read by the dq pass only
  const int* kv_num_blocks;   // [B, H, Nq]; likewise
  const int* q_indices;       // [B, H, Nq * M], q blocks that list kv block j, ascending; not read by the dq pass
  const int* q_offsets;       // [B, H, Nkv + 1], where the list of kv block j begins in q_indices; likewise
  const int* kv_block_sizes;  // [Nkv], 0..64
  const int* order;           // [B * H * Nkv], which item is the n-th (item (b * H + h) * Nkv + j); nullptr: the n-th
  void* dq_accum;     // [B, H, Nq, 64 * D], sum of dS K, unscaled, each block in the order of drain.cuh; fp32, or
                      // what the kernel was built for
  __nv_bfloat16* dk;  // [B, H, Skv, D], final, scale included, zeros for blocks that nobody lists
  __nv_bfloat16* dv;  // [B, H, Skv, D], final, likewise
  int B, H, Nq, Nkv, M;
  int first, items;  // this launch works on places first .. first + items - 1 of the order: all, or one of its waves
  float sm_scale;
  float sm_scale_log2;  // scale of the scores times log2(e): probabilities are exp2(S * sm_scale_log2 - lse_log2)
  float evict_last;     // 0: no policy; else the fraction of the lines of dq_accum that L2 should keep
  bool with_dq;         // false: dk and dv only, dq_accum is not touched (the dq pass makes it)
};

}  // namespace vsa::sm100
