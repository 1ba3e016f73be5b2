// What the registration calls of the forward kernels. Emulated, not yet run on silicon.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace vsa::sm100 {

// Launches the forward on `stream` of the current device. The combination is one that the Python side supports: head
// dim 128, block size 64 or 128; B, Hq, Nq >= 1. Needs no workspace. Throws on any CUDA error.
void launch_forward(const ForwardParams& params, Dtype dtype, int head_dim, int block_size, cudaStream_t stream);

}  // namespace vsa::sm100
