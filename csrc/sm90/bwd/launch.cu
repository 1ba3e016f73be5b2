#include "launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../checks.h"
#include "prepare.h"
#include "run.h"

namespace vsa::sm90 {

int64_t backward_workspace_bytes(const AttentionBackwardParams& params, int, int) {
  return bwd::schedule_bytes(params);
}

void launch_backward(const AttentionBackwardParams& params, Dtype dtype, int head_dim, int block_size,
                     cudaStream_t stream) {
  if (block_size != 64) refuse("block_size", std::to_string(block_size), "64");
  const bool bf16 = dtype == Dtype::kBFloat16;
  if (head_dim == 128) {
    (bf16 ? bwd::run_backward<__nv_bfloat16, 128> : bwd::run_backward<__half, 128>)(params, stream);
  } else if (head_dim == 64) {
    (bf16 ? bwd::run_backward<__nv_bfloat16, 64> : bwd::run_backward<__half, 64>)(params, stream);
  } else {
    refuse("head_dim", std::to_string(head_dim), "64 or 128");
  }
}

}  // namespace vsa::sm90
