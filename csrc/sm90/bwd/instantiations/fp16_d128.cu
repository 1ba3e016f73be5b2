#include "../run.cuh"

namespace vsa::sm90::bwd {

template void run_backward<__half, 128>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace vsa::sm90::bwd
