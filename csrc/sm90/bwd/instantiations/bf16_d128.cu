#include "../run.cuh"

namespace vsa::sm90::bwd {

template void run_backward<__nv_bfloat16, 128>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace vsa::sm90::bwd
