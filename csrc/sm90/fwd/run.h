// One instantiation of the forward: what instantiations/ has an object file each for.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace vsa::sm90::fwd {

// The kernel of `launch_forward` for operands of T, this head dim and this block size.
template <typename T, int kHeadDim, int kBlockSize>
void run_forward(const AttentionForwardParams& params, cudaStream_t stream);

}  // namespace vsa::sm90::fwd
