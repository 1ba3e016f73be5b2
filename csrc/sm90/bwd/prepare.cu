#include "prepare.h"

#include "../../checks.h"
#include "prepare.cuh"

namespace vsa::sm90::bwd {
namespace {

// Kv blocks of a head from which on pairs and their order are worth what they take: at 8192 tokens they cost 0.010 ms
// of 0.371 (NOTES.md).
constexpr int kLeastPairedBlocks = 256;

// Of the accumulator, 16 bytes each: enough blocks to fill the device, each with some work.
constexpr int64_t kVectorsOfBlock = 8 * kPrepareThreads;

}  // namespace

int64_t schedule_bytes(const AttentionBackwardParams& params) {
  if (params.Nkv < kLeastPairedBlocks) return 0;
  return int64_t{Schedule::kBytesOfItem} * params.B * params.Hkv * dkdv_items_of_head(params);
}

void prepare(const AttentionBackwardParams& params, int head_dim, bool zero_dq, cudaStream_t stream) {
  const int rows = params.B * params.Hkv;
  const int64_t pairing_blocks = params.workspace == nullptr ? 0 : int64_t{rows} * pairing_groups(params);
  const int64_t vectors = zero_dq ? int64_t{params.B} * params.Hq * params.Nq * kBlock * head_dim / 4 : 0;
  const int64_t blocks = pairing_blocks + (vectors + kVectorsOfBlock - 1) / kVectorsOfBlock;
  if (blocks == 0) return;
  prepare_kernel<<<static_cast<unsigned>(blocks), kPrepareThreads, 0, stream>>>(
      params, static_cast<int>(pairing_blocks), vectors);
  VSA_CHECK_CUDA(cudaGetLastError());
  if (pairing_blocks == 0) return;
  order_kernel<<<static_cast<unsigned>(rows), kPrepareThreads, 0, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vsa::sm90::bwd
