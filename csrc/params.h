// What the launchers are given: one plain struct per operator. Shapes stand beside the pointers; everything that is not
// a tensor map is contiguous. Letters: B batch, Hq and Hkv heads of queries and of keys (Hkv divides Hq; kv head of
// query head h is h / (Hq / Hkv)), Nq and Nkv blocks of block_size tokens, Sq = Nq * block_size, Skv = Nkv *
// block_size, M width of the lists, D head dim. T is the operand type, bf16 or fp16.
//
// A list is valid up to its count; what stands at or past the count is never read. Ids ascend within a list.
// Pointers of one (batch, head) are 64-bit, offsets inside it fit in 32 bits: the launcher refuses larger ones.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace vsa {

enum class Dtype { kBFloat16, kFloat16 };

// The box of every operand map: 64 columns of 2 bytes fill the 128-byte swizzle pattern, 64 rows are the smallest
// block. A row block of D = 128 is two boxes.
constexpr int kBoxColumns = 64;
constexpr int kBoxRows = 64;

struct AttentionForwardParams {
  // [B, Hkv, Skv, D] in T as maps of dimensions {D, S, H, B}, box {kBoxColumns, kBoxRows, 1, 1}, 128-byte swizzle.
  CUtensorMap k, v;
  const void* q;              // [B, Hq, Sq, D] T at q_strides, rows dense; address and strides multiples of 16 bytes
  int64_t q_strides[3];       // elements between batches, heads and tokens
  void* out;                  // [B, Hq, Sq, D] T, every element written
  float* lse_log2;            // [B, Hq, Sq], or nullptr where it is not wanted
  const int* kv_indices;      // [B, Hq, Nq, M]
  const int* kv_num_blocks;   // [B, Hq, Nq]
  const int* kv_block_sizes;  // [Nkv], 0..block_size
  int B, Hq, Hkv, Nq, Nkv, M;
  float sm_scale_log2;  // scale of the scores times log2(e): probabilities are exp2(S * sm_scale_log2 - lse_log2)
};

struct AttentionBackwardParams {
  CUtensorMap q, k, v, dout;  // as in the forward; dout is [B, Hq, Sq, D]
  const float* lse_log2;      // [B, Hq, Sq], -inf for a row without a key
  const float* delta;         // [B, Hq, Sq], rowsum(out * dout) - dlse_log2 / ln 2
  const int* kv_indices;      // [B, Hq, Nq, M]
  const int* kv_num_blocks;   // [B, Hq, Nq]
  const int* q_indices;       // [B, Hq, Nq * M], q blocks that list kv block j, ascending; nullptr where dk is nullptr
  const int* q_offsets;       // [B, Hq, Nkv + 1], where the list of kv block j begins in q_indices; nullptr likewise
  const int* kv_block_sizes;  // [Nkv]
  float* dq_accum;            // [B, Hq, Sq, D], sum of dS K, unscaled, each block as backends/sm90.py says; or nullptr
  void* dk;         // [B, Hkv, Skv, D] T, final, scale included, zeros for blocks that nobody lists; or nullptr
  void* dv;         // [B, Hkv, Skv, D] T, final, likewise; nullptr exactly when dk is
  void* workspace;  // backward_workspace_bytes(...) bytes of scratch, 256-byte aligned; nullptr if that is 0
  int B, Hq, Hkv, Nq, Nkv, M;
  float sm_scale;
  float sm_scale_log2;
  bool deterministic;  // dq_accum must have the same bits on every run
};

}  // namespace vsa
