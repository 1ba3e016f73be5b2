// Which kernels a backward is made of. Fused unless dq has to have the same bits on every run, or dk and dv are not
// wanted: then dq is a pass of its own.
#pragma once

#include "../../checks.h"
#include "dkdv_kernel.cuh"
#include "dq_kernel.cuh"
#include "prepare.h"
#include "run.h"

namespace vsa::sm90::bwd {

template <typename Traits>
void launch_kernel(void (*kernel)(const AttentionBackwardParams), int64_t blocks, const AttentionBackwardParams& params,
                   cudaStream_t stream) {
  VSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, Traits::kSharedBytes, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

template <typename T, int kHeadDim>
void run_backward(const AttentionBackwardParams& params, cudaStream_t stream) {
  const bool with_dkdv = params.dk != nullptr;
  const bool with_dq = params.dq_accum != nullptr;
  const bool fused = with_dkdv && with_dq && !params.deterministic;
  if (with_dkdv) {
    prepare(params, kHeadDim, fused, stream);
    const int64_t blocks = int64_t{params.B} * params.Hkv * dkdv_items_of_head(params);
    if (fused) {
      using Traits = DkdvTraits<T, kHeadDim, true>;
      launch_kernel<Traits>(dkdv_kernel<Traits>, blocks, params, stream);
    } else {
      using Traits = DkdvTraits<T, kHeadDim, false>;
      launch_kernel<Traits>(dkdv_kernel<Traits>, blocks, params, stream);
    }
  }
  if (with_dq && !fused) {
    using Traits = DqTraits<T, kHeadDim>;
    const int64_t blocks = int64_t{params.B} * params.Hq * dq_items_of_head(params);
    launch_kernel<Traits>(dq_kernel<Traits>, blocks, params, stream);
  }
}

}  // namespace vsa::sm90::bwd
