// The launch: persistent blocks, one a multiprocessor.
#pragma once

#include <algorithm>

#include "../../checks.h"
#include "config.cuh"
#include "kernel.cuh"
#include "run.h"

namespace vsa::sm90::fwd {

template <typename Traits>
void launch_kernel(const AttentionForwardParams& params, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(SharedStorage<Traits>);
  const auto kernel = attention_forward_kernel<Traits>;
  int device = 0;
  int multiprocessors = 0;
  VSA_CHECK_CUDA(cudaGetDevice(&device));
  VSA_CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  VSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const int64_t q_tiles = int64_t{params.Nq} * Traits::kSubBlocks;
  const int64_t items = int64_t{params.B} * params.Hq * ((q_tiles + kConsumers - 1) / kConsumers);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, multiprocessors));
  kernel<<<blocks, Traits::kThreads, kSharedBytes, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

template <typename T, int kHeadDim, int kBlockSize>
void run_forward(const AttentionForwardParams& params, cudaStream_t stream) {
  launch_kernel<Chosen<T, kHeadDim, kBlockSize>>(params, stream);
}

}  // namespace vsa::sm90::fwd
