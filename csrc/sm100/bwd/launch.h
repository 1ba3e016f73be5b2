// Host entry of the sm_100a backward kernels: emulated, not yet run on silicon.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace vsa::sm100 {

struct BackwardLaunch {
  // Items by cluster launch control: a grid of all of them. Otherwise as many blocks as the device has multiprocessors,
  // each with every so-many-th item.
  bool launch_control = true;
  // One launch for every so many items as there are multiprocessors, so that what runs at a time stays together in L2.
  // Needs params.order.
  bool waves = false;
  // dq by a pass of its own, bitwise the same on every run.
  bool deterministic = false;
};

// `params` but for first, items and with_dq, which are set here. dq_accum holds zeros, unless deterministic. Nothing
// waits; all launches are on `stream`, and may be captured.
void launch_backward(BackwardParams params, const BackwardLaunch& launch, cudaStream_t stream);

}  // namespace vsa::sm100
