// Block-sparse attention, forward, sm_90a.
//
//   q [B, Hq, Sq, D]   k, v [B, Hkv, Skv, D]   out [B, Hq, Sq, D]   lse_log2 [B, Hq, Sq]      T, fp32 for lse
//   lists of kv blocks per (batch, head, q block); a tile is 64 tokens, a block one or two of them
//
// A work item is kConsumers neighbouring q tiles of one head, a consumer warpgroup each. Their lists are merged: as a
// rule, a tile of K and V that both of them want is loaded once. Persistent blocks, one a multiprocessor, take items
// blockIdx.x, blockIdx.x + gridDim.x, ...; all roles walk the same items, each at its own pace.
//
//   Scheduler  warp 0 of the producer warpgroup   lists, sizes -> records[kRecords]
//   Loader     warps 1, 2    k -> sK[kKeyStages], v -> sV[kValueStages], by tensor copies
//   Clearer    warp 3        zeros behind the keys of tiles that are not full
//   Consumer   warpgroups 1, 2   q to registers; S = Q K^T -> softmax -> O += P V
//
//   records  --full/empty-->  Loaders, Clearer, Consumers
//   k, v     --full/empty-->  Consumers; v_raw --> Clearer --> v_full for tiles that are not full
// Every empty barrier counts the warps of all consumers; a loader arrives for those that do not want the tile, so that
// nobody touches tiles of others.
#pragma once

#include "../../ptx/registers.cuh"
#include "consumer.cuh"
#include "producer.cuh"
#include "schedule.cuh"

namespace vsa::sm90::fwd {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ AttentionForwardParams params) {
  static_assert(sizeof(SharedStorage<Traits>) <= kMaxSharedBytes, "the stages do not fit in shared memory");
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedStorage<Traits>& shared = *reinterpret_cast<SharedStorage<Traits>*>(shared_bytes);

  // The shuffle tells the compiler that the number is the same in the whole warp.
  const int warp = __shfl_sync(ptx::kWholeWarp, threadIdx.x / kWarp, 0);
  const int lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(params.k);
    ptx::prefetch_map(params.v);
    shared.init_barriers();
  }
  __syncthreads();

  if (warp < kWarpsPerGroup) {
    ptx::shrink_registers<Traits::kProducerRegisters>();
    if (warp == 0) {
      Scheduler<Traits>(params, shared, lane).run();
    } else if (warp == 1) {
      load_keys<Traits>(params, shared);
    } else if (warp == 2) {
      load_values<Traits>(params, shared);
    } else {
      clear_values<Traits>(params, shared, lane);
    }
  } else {
    ptx::grow_registers<Traits::kConsumerRegisters>();
    Consumer<Traits>(params, shared, warp / kWarpsPerGroup - 1, threadIdx.x % kWarpgroup).run();
  }
}

}  // namespace vsa::sm90::fwd
