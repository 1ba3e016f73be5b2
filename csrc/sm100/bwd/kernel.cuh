// The sm_100a backward main kernel: dk and dv of kv blocks, and their share of dq. Emulated, not yet run on silicon.
//
// A work item is one kv block (64 keys) of one (batch, head) and its list of q blocks (64 queries each), walked two q
// blocks a step. D is 128. Q and dO are read through their transposes only.
//
//   sK, sV    [2 boxes][64 keys, 64 columns]
//   sQ, sDout [2 stages][2 q blocks][128 head dim, 64 queries]
//   sP, sDs   [128 queries, 64 keys]             sDq [4 warps][2 pieces][32 queries, 32 columns] of dq
//
//   tensor memory, 128 lanes by 512 columns:
//     0       64      128     192     256     320   352     416     480
//     | S     | dP    | dq^T  | dq^T  | dq^T  | K^T | dv^T  | dk^T  | free |
//     lanes: the queries of a step (S, dP), else head dim; columns of S, dP, dv^T, dk^T, K^T: keys, of dq^T: queries
//
//   role       warps
//   Scheduler  1   items of the grid or of cluster launch control -> full_item               waits empty_item
//   Loader     1   K -> full_k; V -> full_v; Q^T -> full_q, dO^T -> full_dout [stage]        waits their empty_*
//   MmaIssuer  1   S  -> full_s                                          waits full_k, full_q, full_p of the step
//   before
//                  dP -> full_dp                                      waits full_v, full_dout, full_ds of the step
//                  before dv -> empty_dout                                                waits full_p,
//                  empty_accumulators dk -> empty_q                                                   waits full_ds dq
//                  -> full_dq [q block]                                         waits full_key_operand, empty_dq last
//                  of an item: S -> empty_k, dP -> empty_v, dk -> full_accumulators, dq -> empty_key_operand
//   Compute    8   P -> full_p; dS -> full_ds                                      waits full_s, full_dp
//   Drain      4   dq by bulk reductions into dq_accum -> empty_dq                 waits full_dq
//   Epilogue   4   K^T -> full_key_operand, empty_k                                waits full_k, empty_key_operand
//                  dv, dk to global memory -> empty_accumulators                   waits full_accumulators
//   (1 warp allocates tensor memory)
//
// Order of products, s a step of any item:  S(0) | dP(0) dv(0) S(1) dk(0) dq(0) | dP(1) dv(1) S(2) dk(1) dq(1) | ...
// So P(s + 1) is computed behind dk(s) and dq(s), dS(s) behind dv(s) and S(s + 1), and Q^T(s + 2) comes while dq(s) to
// dv(s + 1) run.
#pragma once

#include "../../ptx/registers.cuh"
#include "compute.cuh"
#include "drain.cuh"
#include "epilogue.cuh"
#include "loader.cuh"
#include "mma_issuer.cuh"

namespace vsa::sm100::bwd {

template <typename Traits>
__device__ void init_barriers(typename Traits::Shared& shared) {
  for (int i = 0; i < Traits::kItems; ++i) {
    ptx::init_barrier(shared.full_item[i], 1);
    ptx::init_barrier(shared.empty_item[i], Traits::kItemReaders);
  }
  ptx::init_barrier(shared.full_k, 1);
  ptx::init_barrier(shared.empty_k, 1 + kWarpsOfGroup);  // the last S, and the Epilogue
  ptx::init_barrier(shared.full_v, 1);
  ptx::init_barrier(shared.empty_v, 1);
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    ptx::init_barrier(shared.full_q[stage], 1);
    ptx::init_barrier(shared.empty_q[stage], 1);
    ptx::init_barrier(shared.full_dout[stage], 1);
    ptx::init_barrier(shared.empty_dout[stage], 1);
  }
  ptx::init_barrier(shared.full_s, 1);
  ptx::init_barrier(shared.full_p, Traits::kComputeWarps);
  ptx::init_barrier(shared.full_dp, 1);
  ptx::init_barrier(shared.full_ds, Traits::kComputeWarps);
  for (int slot = 0; slot < Traits::kDqSlots; ++slot) {
    ptx::init_barrier(shared.full_dq[slot], 1);
    ptx::init_barrier(shared.empty_dq[slot], kWarpsOfGroup);
  }
  ptx::init_barrier(shared.full_key_operand, kWarpsOfGroup);
  ptx::init_barrier(shared.empty_key_operand, 1);
  ptx::init_barrier(shared.full_accumulators, 1);
  ptx::init_barrier(shared.empty_accumulators, kWarpsOfGroup);
  ptx::init_barrier(shared.full_response, 1);
  ptx::fence_barrier_init();
}

template <typename Traits>
__device__ __forceinline__ void run_single(const BackwardParams& params, typename Traits::Shared& shared, int warp) {
  if (ptx::elect_one()) {
    if (warp == Traits::kLoaderWarp) load<Traits>(params, shared);
    if (warp == Traits::kIssuerWarp) issue<Traits>(params, shared);
    if (warp == Traits::kSchedulerWarp) schedule<Traits>(params, shared);
  }
  __syncwarp();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(kSwizzleBytes) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int group = __shfl_sync(ptx::kWholeWarp, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int thread = threadIdx.x % kWarpgroup;
  const int warp = __shfl_sync(ptx::kWholeWarp, thread / kWarp, 0);
  const int lane = thread % kWarp;

  if (group == Traits::kSingles && warp == Traits::kSchedulerWarp && lane == 0) init_barriers<Traits>(shared);
  if (group == Traits::kSingles && warp == Traits::kAllocatorWarp) {
    ptx::allocate_tensor_memory<Traits::kTensorColumns>(shared.tensor_memory);
    ptx::relinquish_tensor_memory();
  }
  ptx::fence_before_sync();
  __syncthreads();
  ptx::fence_after_sync();

  if (group == Traits::kSingles) {
    ptx::shrink_registers<Traits::kSingleRegisters>();
    run_single<Traits>(params, shared, warp);
  } else if (group == Traits::kDrain) {
    ptx::shrink_registers<Traits::kDrainRegisters>();
    drain<Traits>(params, shared, warp, lane);
  } else if (group == Traits::kEpilogue) {
    ptx::shrink_registers<Traits::kEpilogueRegisters>();
    write_gradients<Traits>(params, shared, thread);
  } else {
    ptx::grow_registers<Traits::kComputeRegisters>();
    compute<Traits>(params, shared, group - Traits::kFirstCompute, thread);
  }

  ptx::fence_before_sync();
  __syncthreads();
  ptx::fence_after_sync();
  if (group == Traits::kSingles && warp == Traits::kAllocatorWarp) {
    ptx::free_tensor_memory<Traits::kTensorColumns>(shared.tensor_memory);
  }
}

}  // namespace vsa::sm100::bwd
