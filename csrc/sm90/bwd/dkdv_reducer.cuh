// The Reducer of the fused kernel, its Publisher and its Drainer: dq of a q block, summed over the kv blocks of the
// item that want it, added to the accumulator in global memory.
//
//   rDq [64 queries, 64 columns] = sum over consumers of dS K: A is dS^T read along its columns, B a box of K
//
// Half of the columns at a time at D 128: 64 accumulators would take registers that the Consumers need.
//
// Each warp writes the fragments of its 16 queries to shared memory in pieces of 64 columns, and the Drainer adds each
// piece by one bulk reduction, whose elements may stand in any order as long as all do alike. So a piece is written as
// it stands in registers, without bank conflicts: the accumulator of a q block is
//
//   [warp 4][j D/8][g 8][c 4][h 2][i 2] fp32 = dq[16 warp + 8 h + g][8 j + 2 c + i]
#pragma once

#include "../../ptx/bulk.cuh"
#include "../../ptx/bulk_reduce.cuh"
#include "../../ptx/warp.cuh"
#include "dkdv_item.cuh"
#include "products.cuh"

namespace vsa::sm90::bwd {

// rDq [64 queries, 64 columns] = or += dS K for dS^T [64 keys, 64 queries] and one box of K.
template <typename T>
__device__ __forceinline__ void multiply_ds(float (&rDq)[kBoxColumns / 2], const uint8_t* sDs, const uint8_t* sK,
                                            bool accumulate) {
  const uint64_t descriptor_ds = ptx::matrix_descriptor(sDs);
  const uint64_t descriptor_k = ptx::matrix_descriptor(sK);
  constexpr int kStepBytes = kDepth * kBoxColumns * kElementBytes;
#pragma unroll
  for (int k = 0; k < kBlock / kDepth; ++k) {
    ptx::Wgmma<T, kBoxColumns>::template multiply<ptx::Major::kMn, ptx::Major::kMn>(
        rDq, ptx::advance_descriptor(descriptor_ds, k * kStepBytes),
        ptx::advance_descriptor(descriptor_k, k * kStepBytes), accumulate || k > 0);
  }
}

template <typename Traits>
__device__ void reduce(typename Traits::Shared& shared, int thread) {
  using T = typename Traits::T;
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;
  ptx::RingPosition<Traits::kPlanSteps> plan;
  uint32_t turns[kConsumers] = {};  // tiles taken of each consumer: slot and parity
  ptx::RingPosition<Traits::kPieces> piece;

  // K is there: the consumers waited for it before they wrote dS.
  for (;; plan.advance()) {
    ptx::wait(shared.planned[plan.stage], plan.parity);
    const int wanted = shared.sPlan[plan.stage].wanted;
    if (wanted == 0) break;
    const uint32_t slots[kConsumers] = {turns[0] % Traits::kSlots, turns[1] % Traits::kSlots};
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      if (wanted >> c & 1) ptx::wait(shared.visible_ds[c][slots[c]], turns[c] / Traits::kSlots % 2);
    }

#pragma unroll
    for (int box = 0; box < Traits::kBoxes; ++box) {
      float rDq[kBoxColumns / 2];
      const auto add = [&](int c, bool accumulate) {
        const uint32_t slot = c == 0 ? slots[0] : slots[1];
        multiply_ds<T>(rDq, shared.sDs[c][slot], shared.sK[c] + box * kBoxBytes, accumulate);
      };
      __syncwarp();  // lanes left the waits, and one of them its branch, one by one
      // A branch between products of one group makes ptxas serialise all of them.
      if (wanted == kBothConsumers) {
        ptx::fence_products();
        add(0, false);
        add(1, true);
        ptx::commit_products();
        ptx::wait_products<0>();
      } else {
        ptx::fence_products();
        add(wanted >> 1, false);
        ptx::commit_products();
        ptx::wait_products<0>();
      }
      ptx::hold_registers(rDq);
      if (box == Traits::kBoxes - 1 && ptx::elect_one()) {
#pragma unroll
        for (int c = 0; c < kConsumers; ++c) {
          if (wanted >> c & 1) ptx::arrive(shared.empty_ds[c][slots[c]]);
        }
      }

      ptx::wait(shared.empty_dq[warp][piece.stage], piece.parity ^ 1);
      float4* sDq = reinterpret_cast<float4*>(shared.sDq[warp][piece.stage]);
#pragma unroll
      for (int j = 0; j < kBoxColumns / 8; ++j) {
        sDq[j * kWarp + lane] = float4{rDq[4 * j], rDq[4 * j + 1], rDq[4 * j + 2], rDq[4 * j + 3]};
      }
      __syncwarp();
      if (ptx::elect_one()) ptx::arrive(shared.full_dq[warp][piece.stage]);
      piece.advance();
    }
    turns[0] += wanted & 1;
    turns[1] += wanted >> 1;
  }
}

// The Publisher: makes the dS tiles of one consumer visible to wgmma, for the Reducer. By one thread: a fence of the
// threads that write waits until the writes are done, this one finds them done and holds up nobody. The Publishers are
// lanes of one warp and go through the steps together: nobody waits for one whose consumer skips steps, and the
// Scheduler would come round the ring and overwrite what it has yet to read.
template <typename Traits>
__device__ void publish_ds(typename Traits::Shared& shared, int consumer) {
  ptx::RingPosition<Traits::kPlanSteps> plan;
  ptx::RingPosition<Traits::kSlots> slot;
  for (;; plan.advance()) {
    __syncwarp((1u << kConsumers) - 1);
    ptx::wait(shared.planned[plan.stage], plan.parity);
    const int wanted = shared.sPlan[plan.stage].wanted;
    if (wanted == 0) break;
    if ((wanted >> consumer & 1) == 0) continue;
    ptx::wait(shared.full_ds[consumer][slot.stage], slot.parity);
    ptx::fence_async_shared();
    ptx::arrive(shared.visible_ds[consumer][slot.stage]);
    slot.advance();
  }
}

// The Drainer: adds the pieces of one warp of the Reducer to the accumulator. By one thread, which also makes the
// warp's writes visible to the copy engine.
template <typename Traits>
__device__ void drain(const AttentionBackwardParams& params, typename Traits::Shared& shared, int warp) {
  ptx::RingPosition<Traits::kPlanSteps> plan;
  ptx::RingPosition<Traits::kPieces> piece;
  bool first = true;
  for (;; plan.advance()) {
    ptx::wait(shared.planned[plan.stage], plan.parity);
    const Step step = shared.sPlan[plan.stage];
    if (step.wanted == 0) break;
    float* target = params.dq_accum + (int64_t{step.block} * kWarpsOfGroup + warp) * kPieceRows * Traits::kHeadDim;
    for (int box = 0; box < Traits::kBoxes; ++box) {
      ptx::wait(shared.full_dq[warp][piece.stage], piece.parity);
      ptx::fence_async_shared();
      ptx::reduce_add(target + box * kPieceFloats, shared.sDq[warp][piece.stage], sizeof(float) * kPieceFloats);
      ptx::commit_bulk_group();
      // The piece before this one is free when it has been read.
      if (!first) {
        ptx::wait_bulk_reads<1>();
        ptx::arrive(shared.empty_dq[warp][piece.stage ^ 1]);
      }
      first = false;
      piece.advance();
    }
  }
  ptx::wait_bulk_reads<0>();
}

}  // namespace vsa::sm90::bwd
