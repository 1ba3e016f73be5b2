#include "launch.h"

#include <algorithm>
#include <climits>

#include "../../checks.h"
#include "dq_kernel.cuh"
#include "kernel.cuh"

namespace vsa::sm100 {
namespace {

template <typename Traits>
void launch_kernel(void (*kernel)(const BackwardParams), int blocks, const BackwardParams& params,
                   cudaStream_t stream) {
  VSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, Traits::kSharedBytes, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

int count_multiprocessors() {
  int device = 0, count = 0;
  VSA_CHECK_CUDA(cudaGetDevice(&device));
  VSA_CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace

void launch_backward(BackwardParams params, const BackwardLaunch& launch, cudaStream_t stream) {
  const int64_t items = int64_t{params.B} * params.H * params.Nkv;
  const int64_t q_blocks = int64_t{params.B} * params.H * params.Nq;
  if (std::max(items, q_blocks) > INT_MAX) refuse("k", text(items, " kv blocks in all"), text("up to ", INT_MAX));
  if (launch.waves && params.order == nullptr) {
    refuse("order", "waves in the order of ids", "waves of an order that a kernel or the caller made");
  }
  params.with_dq = !launch.deterministic;
  const int multiprocessors = count_multiprocessors();
  const int64_t of_launch = launch.waves ? multiprocessors : items;
  for (int64_t first = 0; first < items; first += of_launch) {
    params.first = static_cast<int>(first);
    params.items = static_cast<int>(std::min(of_launch, items - first));
    if (launch.launch_control) {
      using Traits = bwd::BackwardTraits<true>;
      launch_kernel<Traits>(bwd::backward_kernel<Traits>, params.items, params, stream);
    } else {
      using Traits = bwd::BackwardTraits<false>;
      launch_kernel<Traits>(bwd::backward_kernel<Traits>, std::min(params.items, multiprocessors), params, stream);
    }
  }
  if (launch.deterministic) {
    using Traits = bwd::DqTraits;
    launch_kernel<Traits>(bwd::dq_kernel<Traits>, static_cast<int>(q_blocks), params, stream);
  }
}

}  // namespace vsa::sm100
