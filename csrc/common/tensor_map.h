// Tensor maps for the bulk tensor copies, made by the driver at every call.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../params.h"

namespace vsa {

// A tensor of 16-bit elements, dimensions and strides outermost first, in elements.
struct Tensor4 {
  void* data;
  int64_t sizes[4];
  int64_t strides[4];
};

// Whether a map can describe `x`: rows are dense, base and strides are multiples of 16 bytes, and no stride is zero. A
// stride along a dimension of one element does not count.
bool tma_ready(const Tensor4& x);

// The map of [B, H, S, D], which must be tma_ready and not empty, for boxes of kBoxColumns x kBoxRows.
CUtensorMap block_map(const Tensor4& x, Dtype dtype);

// The map of a dense matrix of `rows` by `columns`, a multiple of 8 and neither 0, for boxes of kBoxColumns columns by
// `box_rows` rows.
CUtensorMap matrix_map(void* data, int64_t rows, int64_t columns, int box_rows, Dtype dtype);

}  // namespace vsa
