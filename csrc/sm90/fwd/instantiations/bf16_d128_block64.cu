#include "../run.cuh"

namespace vsa::sm90::fwd {

template void run_forward<__nv_bfloat16, 128, 64>(const AttentionForwardParams&, cudaStream_t);

}  // namespace vsa::sm90::fwd
