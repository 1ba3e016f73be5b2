// The fused backward kernel: dk and dv of two kv blocks of a (batch, kv head), and their share of dq.
//
//   sK, sV       [2 kv blocks][64, D]  resident
//   sQ, sDout    [stages][64, D]       one q block of the union of the two lists; sLse, sDelta [stages][64]
//   sDs          [2 consumers][slots][64 keys, 64 queries]
//   sDq          [4 warps][pieces][16 queries, 64 columns] fp32
//
//   Scheduler   steps of the walk to sPlan -------> planned[step]          waits empty[stage]
//   Producer    K, V;  Q, dO, lse, delta ---------> full[stage]
//   Consumer c  S -> P;  dP, dv;  dS to sDs ------> full_ds[c][slot];  dk ---------------> empty[stage]
//   Publisher   proxy fence ----------------------> visible_ds[c][slot]
//   Reducer     dq = sum over c of dS K ----------> empty_ds[c][slot];  dq to sDq -------> full_dq[warp][piece]
//   Drainer     proxy fence, reduction into dq_accum ----------------------------------> empty_dq[warp][piece]
//
// What the async proxy reads of generic writes is fenced by the Publisher and the Drainer, single threads behind the
// barrier that the writers arrive at: in the writers' own time those fences cost 5 % of the Consumers' and 31 % of the
// Reducer's (NOTES.md). All but the Consumers learn the steps of the walk from sPlan: a stage, and with it what
// Consumers read there, is gone before the Reducer comes to it.
#pragma once

#include "../../ptx/registers.cuh"
#include "dkdv_consumer.cuh"
#include "dkdv_producer.cuh"
#include "dkdv_reducer.cuh"

namespace vsa::sm90::bwd {

template <typename Traits>
__device__ __forceinline__ void init_barriers(typename Traits::Shared& shared) {
  ptx::init_barrier(shared.full_k, 1);
  ptx::init_barrier(shared.full_v, 1);
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    ptx::init_barrier(shared.full[stage], 2);
    ptx::init_barrier(shared.empty[stage], kConsumers * kWarpsOfGroup);
  }
  for (int c = 0; c < kConsumers; ++c) {
    for (int slot = 0; slot < Traits::kSlots; ++slot) {
      ptx::init_barrier(shared.full_ds[c][slot], kWarpsOfGroup);
      ptx::init_barrier(shared.visible_ds[c][slot], 1);
      ptx::init_barrier(shared.empty_ds[c][slot], kWarpsOfGroup);
    }
  }
  for (int warp = 0; warp < kWarpsOfGroup; ++warp) {
    for (int piece = 0; piece < Traits::kPieces; ++piece) {
      ptx::init_barrier(shared.full_dq[warp][piece], 1);
      ptx::init_barrier(shared.empty_dq[warp][piece], 1);
    }
  }
  for (int step = 0; step < Traits::kPlanSteps; ++step) ptx::init_barrier(shared.planned[step], 1);
  ptx::fence_barrier_init();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dkdv_kernel(const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(kSwizzleAlignment) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int group = __shfl_sync(ptx::kWholeWarp, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int thread = threadIdx.x % kWarpgroup;

  if (threadIdx.x == 0) {
    init_barriers<Traits>(shared);
    shared.item = dkdv_item(params, blockIdx.x, static_cast<const KvPair*>(params.workspace));  // prepare.cuh
  }
  __syncthreads();

  if (group == Traits::kProducer) {
    ptx::shrink_registers<Traits::kProducerRegisters>();
    const int warp = thread / kWarp;
    const int lane = thread % kWarp;
    if (warp == Traits::kSchedulerWarp && lane == 0) schedule<Traits>(params, shared, shared.item);
    if (warp == Traits::kProducerWarp) produce<Traits>(params, shared, shared.item, lane);
    if constexpr (Traits::kWithDq) {
      if (warp == Traits::kDrainerWarp && lane < kWarpsOfGroup) drain<Traits>(params, shared, lane);
      if (warp == Traits::kPublisherWarp && lane < kConsumers) publish_ds<Traits>(shared, lane);
    }
  } else if (Traits::kWithDq && group == Traits::kReducer) {
    if constexpr (Traits::kWithDq) {
      ptx::shrink_registers<Traits::kReducerRegisters>();
      reduce<Traits>(shared, thread);
    }
  } else {
    ptx::grow_registers<Traits::kConsumerRegisters>();
    consume<Traits>(params, shared, group - Traits::kFirstConsumer, thread);
  }
}

}  // namespace vsa::sm90::bwd
