// What a warp reads of tensor memory: columns of its own 32 lanes.
#pragma once

#include "../../ptx/tcgen05_alloc.cuh"
#include "../../ptx/tcgen05_ld.cuh"
#include "../../ptx/tcgen05_mma.cuh"
#include "traits.cuh"

namespace vsa::sm100::bwd {

// Columns from `address` (lane 0) on, of this thread's lane; waits for them. `warp`: in its warpgroup.
template <int kColumns>
__device__ __forceinline__ void read_columns(float (&values)[kColumns], uint32_t address, int warp) {
  ptx::load_columns(values, ptx::tensor_address(address, warp * ptx::kTensorLanesOfWarp, 0));
  ptx::await_loads(values);
}

}  // namespace vsa::sm100::bwd
