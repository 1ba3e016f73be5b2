// What comes before the fused kernel: prepare.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../params.h"

namespace vsa::sm90::bwd {

// Bytes of the work items and their order, 0 where items are taken as they stand.
int64_t schedule_bytes(const AttentionBackwardParams& params);

// Zeros the accumulator if `zero_dq`, and pairs and orders kv blocks if there is a workspace for that.
void prepare(const AttentionBackwardParams& params, int head_dim, bool zero_dq, cudaStream_t stream);

}  // namespace vsa::sm90::bwd
