#include "../run.cuh"

namespace vsa::sm100::fwd {

template void run_forward<__nv_bfloat16, 64>(const ForwardParams&, cudaStream_t);

}  // namespace vsa::sm100::fwd
