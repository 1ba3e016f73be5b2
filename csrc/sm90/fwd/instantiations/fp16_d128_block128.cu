#include "../run.cuh"

namespace vsa::sm90::fwd {

template void run_forward<__half, 128, 128>(const AttentionForwardParams&, cudaStream_t);

}  // namespace vsa::sm90::fwd
