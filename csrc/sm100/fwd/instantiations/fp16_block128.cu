#include "../run.cuh"

namespace vsa::sm100::fwd {

template void run_forward<__half, 128>(const ForwardParams&, cudaStream_t);

}  // namespace vsa::sm100::fwd
