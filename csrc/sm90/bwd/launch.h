// What the registration calls of the backward kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../params.h"

namespace vsa::sm90 {

// Bytes of scratch that `launch_backward` wants in `params.workspace`; the maps and pointers of `params` are not read.
int64_t backward_workspace_bytes(const AttentionBackwardParams& params, int head_dim, int block_size);

// Launches the backward on `stream` of the current device, zeroing of the accumulator included. B, Hq, Nq, Nkv >= 1.
// Throws on any CUDA error.
void launch_backward(const AttentionBackwardParams& params, Dtype dtype, int head_dim, int block_size,
                     cudaStream_t stream);

}  // namespace vsa::sm90
