#include "prepare.h"

#include "../checks.h"
#include "prepare.cuh"

namespace vsa::sm100 {
namespace {

constexpr int kHeadDim = 128;
// Of the accumulator, 16 bytes each: enough blocks to fill the device, each with some work.
constexpr int64_t kVectorsOfBlock = 8 * kPrepareThreads;

}  // namespace

void launch_transpose(const TransposeParams& params, cudaStream_t stream) {
  const int64_t blocks = int64_t{params.B} * params.H * params.Nq;
  if (blocks == 0) return;
  transpose_kernel<kHeadDim><<<static_cast<unsigned>(blocks), kPrepareThreads, 0, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

void launch_clear(const ClearParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.B} * params.H;
  const int64_t elements = params.dq_accum == nullptr ? 0 : rows * params.Nq * kPrepareBlock * kHeadDim;
  const int64_t vectors = elements * static_cast<int64_t>(sizeof(float)) / 16;
  const int64_t accumulator_blocks = (vectors + kVectorsOfBlock - 1) / kVectorsOfBlock;
  const int64_t blocks = accumulator_blocks + (params.dk == nullptr ? 0 : rows * params.Nkv);
  if (blocks == 0) return;
  clear_kernel<kHeadDim><<<static_cast<unsigned>(blocks), kPrepareThreads, 0, stream>>>(
      params, static_cast<int>(accumulator_blocks), vectors);
  VSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vsa::sm100
