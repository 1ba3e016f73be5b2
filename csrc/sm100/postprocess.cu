#include "postprocess.h"

#include "../checks.h"
#include "accumulator_order.h"
#include "postprocess.cuh"

namespace vsa::sm100 {

void launch_postprocess(const PostprocessParams& params, cudaStream_t stream) {
  const int64_t blocks = int64_t{params.rows} * params.Nq;
  if (blocks == 0) return;
  postprocess_kernel<AccumulatorOrder><<<static_cast<unsigned>(blocks), kPostprocessThreads, 0, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vsa::sm100
