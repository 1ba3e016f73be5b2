#include "launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "../../checks.h"
#include "run.h"

namespace vsa::sm90 {
namespace {

template <typename T>
void launch_typed(const AttentionForwardParams& params, int head_dim, int block_size, cudaStream_t stream) {
  if (head_dim == 128) {
    (block_size == 64 ? fwd::run_forward<T, 128, 64> : fwd::run_forward<T, 128, 128>)(params, stream);
  } else {
    (block_size == 64 ? fwd::run_forward<T, 64, 64> : fwd::run_forward<T, 64, 128>)(params, stream);
  }
}

}  // namespace

void launch_forward(const AttentionForwardParams& params, Dtype dtype, int head_dim, int block_size,
                    cudaStream_t stream) {
  if (head_dim != 64 && head_dim != 128) refuse("head_dim", std::to_string(head_dim), "64 or 128");
  if (block_size != 64 && block_size != 128) refuse("block_size", std::to_string(block_size), "64 or 128");
  (dtype == Dtype::kBFloat16 ? launch_typed<__nv_bfloat16> : launch_typed<__half>)(params, head_dim, block_size,
                                                                                   stream);
}

}  // namespace vsa::sm90
