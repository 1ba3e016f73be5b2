// What comes before the fused kernel: prepare.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../params.h"

namespace vsa::sm90::bwd {

// Bytes of the order of work items, 0 where items are taken as they stand.
int64_t order_bytes(const AttentionBackwardParams& params);

// Zeros the accumulator if `zero_dq`, and orders the items if there is a workspace for that.
void prepare(const AttentionBackwardParams& params, int head_dim, bool zero_dq, cudaStream_t stream);

}  // namespace vsa::sm90::bwd
