// Cluster launch control: a running block takes over one that has not started. PTX ISA 9.7.13.16.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace vsa::ptx {

struct alignas(16) CancelResponse {
  uint64_t opaque[2];
};

constexpr uint32_t kCancelResponseBytes = sizeof(CancelResponse);

// Asks for a block; `barrier` is told kCancelResponseBytes. Not to be asked again once a response was that none is
// left.
__device__ __forceinline__ void try_cancel(CancelResponse& response, Barrier& barrier) {
  asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(
                   shared_address(&response)),
               "r"(shared_address(&barrier))
               : "memory");
}

// blockIdx.x of the block that was taken over, -1 if none was left. The response comes by the async proxy: a fence
// (bulk.cuh) has to stand between this and the next try_cancel into the same place.
__device__ __forceinline__ int canceled_block(const CancelResponse& response) {
  int block;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 r;\n"
      "ld.shared.v2.b64 {low, high}, [%1];\n"
      "mov.b128 r, {low, high};\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\n"
      "mov.b32 %0, -1;\n"
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%0, _, _, _}, r;\n"
      "}"
      : "=r"(block)
      : "r"(shared_address(&response))
      : "memory");
  return block;
}

}  // namespace vsa::ptx
