#include "prepare.h"

#include "../../checks.h"
#include "prepare.cuh"

namespace vsa::sm90::bwd {
namespace {

// Kv blocks of a head from which on the order is worth what it takes.
constexpr int kLeastOrderedBlocks = 256;

// Of the accumulator, 16 bytes each: enough blocks to fill the device, each with some work.
constexpr int64_t kVectorsOfBlock = 8 * kPrepareThreads;

}  // namespace

int64_t order_bytes(const AttentionBackwardParams& params) {
  if (params.Nkv < kLeastOrderedBlocks) return 0;
  return int64_t{sizeof(int)} * params.B * params.Hkv * dkdv_items_of_head(params);
}

void prepare(const AttentionBackwardParams& params, int head_dim, bool zero_dq, cudaStream_t stream) {
  const int ordered_rows = params.workspace == nullptr ? 0 : params.B * params.Hkv;
  const int64_t rows = int64_t{params.B} * params.Hq * params.Nq * kBlock;
  const int64_t vectors = zero_dq ? rows * head_dim / 4 : 0;
  const int64_t blocks = ordered_rows + (vectors + kVectorsOfBlock - 1) / kVectorsOfBlock;
  if (blocks == 0) return;
  prepare_kernel<<<static_cast<unsigned>(blocks), kPrepareThreads, 0, stream>>>(params, ordered_rows, vectors);
  VSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vsa::sm90::bwd
