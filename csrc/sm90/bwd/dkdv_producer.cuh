// The Scheduler of the fused kernel, one thread: which q block is next, and who wants it. And its Producer, one warp: K
// and V of the item, then Q, dO, lse and delta of each step.
#pragma once

#include "../../ptx/warp.cuh"
#include "dkdv_item.cuh"
#include "loads.cuh"

namespace vsa::sm90::bwd {

// Plans a step once its stage is empty, so that the ring of stages bounds how far the plan is ahead of everybody.
template <typename Traits>
__device__ void schedule(const AttentionBackwardParams& params, typename Traits::Shared& shared, const DkdvItem& item) {
  ptx::RingPosition<Traits::kStages> ring;
  ptx::RingPosition<Traits::kPlanSteps> plan;
  const auto announce = [&](const Step& step) {
    ptx::wait(shared.empty[ring.stage], ring.parity ^ 1);
    shared.sPlan[plan.stage] = step;
    ptx::arrive(shared.planned[plan.stage]);
    ring.advance();
    plan.advance();
  };
  const int heads = params.Hq / params.Hkv;
  const int first_row = (item.batch * params.Hkv + item.kv_head) * heads;
  for (int row = first_row; row < first_row + heads; ++row) {
    UnionWalk walk = walk_q_blocks(params, item, row);
    for (;;) {
      const Step step = walk.step();
      if (step.wanted == 0) break;
      announce({row * params.Nq + step.block, step.wanted});
    }
  }
  announce({0, 0});
}

template <typename Traits>
__device__ void produce(const AttentionBackwardParams& params, typename Traits::Shared& shared, const DkdvItem& item,
                        int lane) {
  constexpr int kBoxes = Traits::kBoxes;
  if (ptx::elect_one()) {
    ptx::arrive_expect_bytes(shared.full_k, item.blocks * Traits::kRowBlockBytes);
    for (int c = 0; c < item.blocks; ++c) {
      load_row_block<kBoxes>(shared.sK[c], params.k, shared.full_k, item.kv.block[c], item.kv_head, item.batch);
    }
    ptx::arrive_expect_bytes(shared.full_v, item.blocks * Traits::kRowBlockBytes);
    for (int c = 0; c < item.blocks; ++c) {
      load_row_block<kBoxes>(shared.sV[c], params.v, shared.full_v, item.kv.block[c], item.kv_head, item.batch);
    }
  }
  __syncwarp();

  // lse and delta by ordinary loads and stores, 16 bytes a lane: the Consumers read them so, and a copy engine that
  // overwrote them would have to be fenced off in every step.
  constexpr int kLanes = kBlock * sizeof(float) / sizeof(float4);  // of each vector
  static_assert(2 * kLanes == kWarp, "a lane copies 16 bytes");
  const int place = lane % kLanes;
  const float4* statistics = reinterpret_cast<const float4*>(lane < kLanes ? params.lse_log2 : params.delta) + place;

  ptx::RingPosition<Traits::kStages> ring;
  ptx::RingPosition<Traits::kPlanSteps> plan;
  for (;; plan.advance(), ring.advance()) {
    ptx::wait(shared.planned[plan.stage], plan.parity);
    const Step step = shared.sPlan[plan.stage];
    ptx::Barrier& full = shared.full[ring.stage];
    __syncwarp();
    if (step.wanted != 0) {
      if (ptx::elect_one()) {
        const int row = step.block / params.Nq;
        const int batch = row / params.Hq;
        const int q_block = step.block - row * params.Nq, head = row - batch * params.Hq;
        ptx::arrive_expect_bytes(full, Traits::kStageBytes);
        load_row_block<kBoxes>(shared.sQ[ring.stage], params.q, full, q_block, head, batch);
        load_row_block<kBoxes>(shared.sDout[ring.stage], params.dout, full, q_block, head, batch);
      }
      float* target = lane < kLanes ? shared.sLse[ring.stage] : shared.sDelta[ring.stage];
      reinterpret_cast<float4*>(target)[place] = __ldg(statistics + int64_t{step.block} * kLanes);
    }
    if (lane == 0) shared.sWanted[ring.stage] = step.wanted;
    __syncwarp();
    if (ptx::elect_one()) ptx::arrive(full);
    if (step.wanted == 0) break;
  }
  // Of the last phase: it has no bytes.
  if (ptx::elect_one()) ptx::arrive(shared.full[ring.stage]);
}

}  // namespace vsa::sm90::bwd
