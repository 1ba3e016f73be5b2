#include "../run.cuh"

namespace vsa::sm90::bwd {

template void run_backward<__half, 64>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace vsa::sm90::bwd
