// The Drain, four warps: dq of a step from tensor memory to the accumulator in global memory, by bulk reductions.
//
// dq^T [128 head dim, 64 queries] of a q block has a lane for each head-dim column. A warp takes its 32 lanes, 32
// queries at a time, writes them to shared memory as float4 of four queries, lane beside lane (no bank conflicts), and
// adds that piece of 4 KB by one reduction. Elements may stand in any order as long as all do alike, so the accumulator
// of a q block is in the order in which pieces are written:
//
//   [w 4][c 16][l 32][i 4] = dq[query 4 c + i][column 32 w + l]
//
// which is AccumulatorOrder(factors (4, 16, 32, 4), permutation (1, 3, 0, 2)) of backends/sm100.py.
#pragma once

#include <type_traits>

#include "../../common/softmax.cuh"
#include "../../ptx/cache_policy.cuh"
#include "../accumulator_order.h"
#include "items.cuh"
#include "tensor_memory.cuh"

namespace vsa::sm100::bwd {

// Elements between the parts of two warps in the accumulator of a q block.
constexpr int kWarpAccumulator = kBlock * kWarp;
static_assert(AccumulatorOrder::at(0, kWarp) == kWarpAccumulator && AccumulatorOrder::at(4, 0) == 4 * kWarp &&
                  AccumulatorOrder::at(0, 1) == 4 && AccumulatorOrder::at(1, 0) == 1,
              "dq would be finished in another order than it is written in");

// Where dq is not wanted: only the ring of items goes on.
template <typename Traits>
__device__ __forceinline__ void drain_nothing(typename Traits::Shared& shared) {
  ItemReader<Traits, true> items(shared);
  Item item;
  while (items.next(item)) {
  }
}

// The part of this warp of one q block, from tensor memory at `tDq` to `target`; `piece` is the next to be written,
// `empty` told when all of it is in registers.
template <typename Traits>
__device__ __forceinline__ void drain_block(typename Traits::Shared& shared, typename Traits::Accumulator* target,
                                            uint32_t tDq, ptx::Barrier& empty, int& piece, uint64_t policy, int warp,
                                            int lane) {
  using Accumulator = typename Traits::Accumulator;
  constexpr int kQueriesOfPiece = Traits::kPieceQueries;
  static_assert(Traits::kPieces == 2, "one piece is written while the other one is read");
#pragma unroll
  for (int first = 0; first < kBlock; first += kQueriesOfPiece) {
    float rDq[kQueriesOfPiece];
    read_columns(rDq, tDq + first, warp);
    if (first + kQueriesOfPiece == kBlock) {
      ptx::fence_before_sync();
      ptx::arrive_warp(empty);
    }
    if (lane == 0) ptx::wait_bulk_reads<1>();
    __syncwarp();
    Accumulator* sDq = shared.sDq[warp][piece];
#pragma unroll
    for (int c = 0; c < kQueriesOfPiece / 4; ++c) {
      if constexpr (std::is_same_v<Accumulator, float>) {
        reinterpret_cast<float4*>(sDq)[c * kWarp + lane] =
            float4{rDq[4 * c], rDq[4 * c + 1], rDq[4 * c + 2], rDq[4 * c + 3]};
      } else {
        reinterpret_cast<uint2*>(sDq)[c * kWarp + lane] = uint2{pack_pair<Accumulator>(rDq[4 * c], rDq[4 * c + 1]),
                                                                pack_pair<Accumulator>(rDq[4 * c + 2], rDq[4 * c + 3])};
      }
    }
    __syncwarp();
    if (lane == 0) {
      // One fence for the warp, by the thread that all of it met, as the Drainer of sm_90a has it.
      ptx::fence_async_shared();
      ptx::reduce_add(target + first * kWarp, sDq, policy, sizeof(Accumulator) * Traits::kPieceElements);
      ptx::commit_bulk_group();
    }
    piece ^= 1;
  }
}

template <typename Traits>
__device__ void drain(const BackwardParams& params, typename Traits::Shared& shared, int warp, int lane) {
  if (!params.with_dq) return drain_nothing<Traits>(shared);
  const uint64_t policy = ptx::evict_last_policy(params.evict_last);
  ItemReader<Traits, true> items(shared);
  ptx::RingPosition<Traits::kDqSlots> slot;
  int piece = 0;
  Item item;
  while (items.next(item)) {
    const int* list = list_of(params, item);
    for (int at = 0; at < item.count; ++at, slot.advance()) {
      // Before the wait: nothing of global memory is waited for behind it.
      const int64_t q_block = int64_t{item.row} * params.Nq + __ldg(list + at);
      auto* target = static_cast<typename Traits::Accumulator*>(params.dq_accum) + q_block * (kBlock * kHeadDim) +
                     warp * kWarpAccumulator;
      ptx::wait(shared.full_dq[slot.stage], slot.parity);
      ptx::fence_after_sync();
      __syncwarp();
      drain_block<Traits>(shared, target, shared.tensor_memory + Traits::kDqColumn + slot.stage * kBlock,
                          shared.empty_dq[slot.stage], piece, policy, warp, lane);
    }
  }
  if (lane == 0) ptx::wait_bulk_reads<0>();
}

}  // namespace vsa::sm100::bwd
