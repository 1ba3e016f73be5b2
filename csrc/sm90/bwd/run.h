// One instantiation of the backward: what instantiations/ has an object file each for.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace vsa::sm90::bwd {

// The kernels of `launch_backward` for operands of T and this head dim.
template <typename T, int kHeadDim>
void run_backward(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace vsa::sm90::bwd
