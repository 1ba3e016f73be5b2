// One instantiation of the forward: what instantiations/ has an object file each for.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace vsa::sm100::fwd {

// The kernel of `launch_forward` for operands of T and this block size.
template <typename T, int kBlockSize>
void run_forward(const ForwardParams& params, cudaStream_t stream);

}  // namespace vsa::sm100::fwd
