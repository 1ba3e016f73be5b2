// Block-sparse attention, forward, sm_100a and sm_103a: emulated, not yet run on silicon.
//
//   q [B, Hq, Sq, 128]   k, v [B, Hkv, Skv, 128]   out [B, Hq, Sq, 128]   lse_log2 [B, Hq, Sq]      T, fp32 for lse
//   lists of kv blocks per (batch, head, q block); a tile is 64 keys, a block one or two of them
//
// A work item is two streams of 128 neighbouring queries of one head: two q blocks of 128, or two pairs of q blocks
// of 64. The lists of all of them are merged into rounds of a tile for each stream; a tile that both want is copied
// once. Persistent blocks, one a multiprocessor, take items blockIdx.x, blockIdx.x + gridDim.x, ...; all roles walk the
// same items, each at its own pace.
//
//   Scheduler   warp 0        lists, sizes -> rounds[kRounds]
//   Loader      warp 1        q -> sQ[2], k -> sK[kStages], v -> sV[kStages], by tensor copies
//   MmaIssuer   warp 2        S = Q K^T of a round, then O += P V of the one before
//   Clearer     warp 3        zeros behind the keys of V tiles that are not full
//   Softmax     warps 4..11   a warpgroup a stream, a thread a query: S -> P; corrects O where a maximum grew
//   Epilogue    warps 12..15  O / sum -> out, lse; clears O for the next item
//
//   rounds --full/empty--> Loader, MmaIssuer, Clearer, Softmax          Epilogue counts items alone
//   q, k, v --full/empty--> MmaIssuer; v_raw --> Clearer --> v_full for tiles that are not full
//   S --s_full--> Softmax --p_full--> MmaIssuer --s_empty--> S, and O for corrections
//   O --o_full--> Epilogue --o_empty--> MmaIssuer and Softmax; sums --sums_full--> Epilogue
//
// Tensor memory, columns of 32 bits, 128 lanes = queries; P of 64 keys over the first 32 columns of its S:
//   0       128     256        320        384        448     512
//   | O of 0 | O of 1 | S of 0, 0 | S of 0, 1 | S of 1, 0 | S of 1, 1 |
//
// Time, in order of issue (u, v tiles of streams 0 and 1 in a round):
//   tensor core   S(u1) S(v1) | S(u2) S(v2) O(u1) O(v1) | S(u3) S(v3) O(u2) O(v2) | ...
//   Softmax 0           P(u1) ......      | P(u2) ......      |
//   Softmax 1                 P(v1) ......      | P(v2) ......      |
//
// Cycles for a tile of one stream, from published rates (4096 products, 128 bytes of shared memory, 16 exponentials a
// cycle) by arithmetic, not measured:
//   tensor core    S: 8 depths x max(32 of products, 48 of reading Q and K) = 384; O: 4 x 64 = 256; together 640
//   exponentials   128 x 64 / 16 = 512
// With 128 keys a product S would take its 256, but two buffers of such S do not fit beside O, and one leaves the
// stream without work between two products. At the end of an item the tensor core waits for the next queries, of which
// there is one buffer.
//
// Nobody waits in a circle: the MmaIssuer needs K of round r and V of round r - 1, which is the order of the Loader,
// and what the Loader waits for are slots of rounds up to r - 2 for K and r - 3 for V (kStages).
#pragma once

#include "../../ptx/registers.cuh"
#include "epilogue.cuh"
#include "loader.cuh"
#include "mma_issuer.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

namespace vsa::sm100::fwd {

// One of the single warps, or a thread of it.
template <typename Traits>
__device__ __forceinline__ void run_single(const ForwardParams& params, SharedStorage<Traits>& shared, int warp,
                                           int lane) {
  if (warp == Traits::kSchedulerWarp) {
    Scheduler<Traits>(params, shared, lane).run();
  } else if (warp == Traits::kClearerWarp) {
    clear_values<Traits>(params, shared, lane);
  } else if (ptx::elect_one()) {
    if (warp == Traits::kLoaderWarp) {
      Loader<Traits>(params, shared).run();
    } else {
      MmaIssuer<Traits>(params, shared).run();
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ ForwardParams params) {
  static_assert(sizeof(SharedStorage<Traits>) <= kMaxSharedBytes, "the stages do not fit in shared memory");
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedStorage<Traits>& shared = *reinterpret_cast<SharedStorage<Traits>*>(shared_bytes);

  // The shuffle tells the compiler that the number is the same in the whole warp.
  const int warp = __shfl_sync(ptx::kWholeWarp, threadIdx.x / kWarp, 0);
  const int lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(params.q);
    ptx::prefetch_map(params.k);
    ptx::prefetch_map(params.v);
    shared.init_barriers();
  }
  if (warp == Traits::kIssuerWarp) {
    ptx::allocate_tensor_memory<Traits::kTensorColumns>(shared.tensor_memory);
    ptx::relinquish_tensor_memory();
  }
  __syncthreads();

  const int group = warp / kWarpsOfGroup;
  if (group == Traits::kSingles) {
    ptx::shrink_registers<Traits::kSingleRegisters>();
    run_single<Traits>(params, shared, warp, lane);
  } else if (group == Traits::kEpilogue) {
    ptx::shrink_registers<Traits::kEpilogueRegisters>();
    Epilogue<Traits>(params, shared, warp % kWarpsOfGroup, lane).run();
  } else {
    ptx::grow_registers<Traits::kSoftmaxRegisters>();
    Softmax<Traits>(params, shared, group - Traits::kFirstSoftmax, threadIdx.x % kWarpgroup).run();
  }

  // The Epilogue has waited for all that was issued.
  __syncthreads();
  if (warp == Traits::kIssuerWarp) ptx::free_tensor_memory<Traits::kTensorColumns>(shared.tensor_memory);
}

}  // namespace vsa::sm100::fwd
