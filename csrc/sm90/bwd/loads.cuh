// Loads of row blocks through the operand maps.
#pragma once

#include "../../ptx/tma.cuh"
#include "traits.cuh"

namespace vsa::sm90::bwd {

// Copies one block of rows of one (batch, head), box by box.
template <int kBoxes>
__device__ __forceinline__ void load_row_block(uint8_t* target, const CUtensorMap& map, ptx::Barrier& barrier,
                                               int block, int head, int batch) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    ptx::load_box(target + box * kBoxBytes, map, barrier, box * kBoxColumns, block * kBlock, head, batch);
  }
}

}  // namespace vsa::sm90::bwd
