// The launch: persistent blocks, one a multiprocessor.
#pragma once

#include <algorithm>

#include "../../checks.h"
#include "kernel.cuh"
#include "run.h"

namespace vsa::sm100::fwd {

template <typename T, int kBlockSize>
void run_forward(const ForwardParams& params, cudaStream_t stream) {
  using Traits = ForwardTraits<T, kBlockSize>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Traits>);
  constexpr int kBlocksOfItem = kStreams * Traits::kParts;
  const auto kernel = attention_forward_kernel<Traits>;
  int device = 0;
  int multiprocessors = 0;
  VSA_CHECK_CUDA(cudaGetDevice(&device));
  VSA_CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  VSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const int64_t items = int64_t{params.B} * params.Hq * ((params.Nq + kBlocksOfItem - 1) / kBlocksOfItem);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, multiprocessors));
  kernel<<<blocks, Traits::kThreads, kSharedBytes, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vsa::sm100::fwd
