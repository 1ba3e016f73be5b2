#include "around.h"

#include "../../checks.h"
#include "around.cuh"

namespace vsa::sm90 {
namespace {

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + bwd::kAroundThreads - 1) / bwd::kAroundThreads);
}

template <typename T, int kHeadDim>
void delta_of(const DeltaParams& params, cudaStream_t stream) {
  const int64_t threads = int64_t{params.B} * params.H * params.S * (kHeadDim / bwd::kChunk);
  bwd::delta_kernel<T, kHeadDim><<<blocks_for(threads), bwd::kAroundThreads, 0, stream>>>(params);
}

template <typename T, int kHeadDim>
void dq_of(const float* accumulator, void* dq, float scale, int64_t blocks, cudaStream_t stream) {
  const unsigned grid = blocks_for(blocks * 4 * kHeadDim);
  bwd::finish_dq_kernel<T, kHeadDim>
      <<<grid, bwd::kAroundThreads, 0, stream>>>(accumulator, static_cast<T*>(dq), scale, blocks);
}

}  // namespace

void launch_delta(const DeltaParams& params, Dtype dtype, int head_dim, cudaStream_t stream) {
  const bool bf16 = dtype == Dtype::kBFloat16;
  if (head_dim == 128) {
    (bf16 ? delta_of<__nv_bfloat16, 128> : delta_of<__half, 128>)(params, stream);
  } else {
    (bf16 ? delta_of<__nv_bfloat16, 64> : delta_of<__half, 64>)(params, stream);
  }
  VSA_CHECK_CUDA(cudaGetLastError());
}

void launch_finish_dq(const float* accumulator, void* dq, float scale, int64_t blocks, Dtype dtype, int head_dim,
                      cudaStream_t stream) {
  const bool bf16 = dtype == Dtype::kBFloat16;
  if (head_dim == 128) {
    (bf16 ? dq_of<__nv_bfloat16, 128> : dq_of<__half, 128>)(accumulator, dq, scale, blocks, stream);
  } else {
    (bf16 ? dq_of<__nv_bfloat16, 64> : dq_of<__half, 64>)(accumulator, dq, scale, blocks, stream);
  }
  VSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vsa::sm90
