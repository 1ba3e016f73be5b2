// What the launcher of the forward is given; letters as in ../../params.h. Every pointer but the maps is contiguous.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../params.h"

namespace vsa::sm100 {

struct ForwardParams {
  // [B, H, S, D] in T as maps of dimensions {D, S, H, B} of any strides, box {kBoxColumns, kBoxRows, 1, 1}, 128-byte
  // swizzle, zeros out of bounds: q has Hq heads of Sq tokens, k and v Hkv heads of Skv.
  CUtensorMap q, k, v;
  void* out;                  // [B, Hq, Sq, D] T, every element written
  float* lse_log2;            // [B, Hq, Sq], or nullptr where it is not wanted
  const int* kv_indices;      // [B, Hq, Nq, M]
  const int* kv_num_blocks;   // [B, Hq, Nq], 0..M
  const int* kv_block_sizes;  // [Nkv], 0..block_size
  int B, Hq, Hkv, Nq, Nkv, M;
  float sm_scale_log2;  // scale of the scores times log2(e)
};

}  // namespace vsa::sm100
