#include "order.cuh"

namespace vsa::sm100 {

void launch_order(const OrderParams& params, cudaStream_t stream) {
  if (params.Nkv > kMaxOrderedBlocks) {
    refuse("Nkv", text(params.Nkv), text("at most ", kMaxOrderedBlocks, " kv blocks in an order of the device's"));
  }
  if (params.rows == 0 || params.Nkv == 0) return;
  const int shared_bytes = order_shared_bytes(params.Nkv);
  if (shared_bytes + kOrderFixedBytes > kSharedWithoutOptIn) {
    VSA_CHECK_CUDA(cudaFuncSetAttribute(order_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  order_kernel<<<params.rows, kOrderThreads, shared_bytes, stream>>>(params);
  VSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace vsa::sm100
