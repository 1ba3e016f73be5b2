// What the registration calls of the forward kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../params.h"

namespace vsa::sm90 {

// Launches the forward on `stream` of the current device. The combination is one that the Python side supports
// (vsa_inductor/backends/sm90.py: head dim 64 or 128); B, Hq, Nq >= 1. Throws on any CUDA error.
void launch_forward(const AttentionForwardParams& params, Dtype dtype, int head_dim, int block_size,
                    cudaStream_t stream);

}  // namespace vsa::sm90
