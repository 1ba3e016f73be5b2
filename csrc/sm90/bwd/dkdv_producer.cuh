// The Producer of the fused kernel, one thread: K and V of the item, then Q, dO, lse and delta of each q block of the
// union of its lists.
#pragma once

#include "../../ptx/bulk.cuh"
#include "../../ptx/bulk_reduce.cuh"
#include "dkdv_item.cuh"
#include "loads.cuh"

namespace vsa::sm90::bwd {

template <typename Traits>
__device__ void produce(const AttentionBackwardParams& params, typename Traits::Shared& shared, const DkdvItem& item) {
  constexpr int kBoxes = Traits::kBoxes;
  ptx::arrive_expect_bytes(shared.full_k, item.blocks * Traits::kRowBlockBytes);
  for (int c = 0; c < item.blocks; ++c) {
    load_row_block<kBoxes>(shared.sK[c], params.k, shared.full_k, item.kv_block + c, item.kv_head, item.batch);
  }
  ptx::arrive_expect_bytes(shared.full_v, item.blocks * Traits::kRowBlockBytes);
  for (int c = 0; c < item.blocks; ++c) {
    load_row_block<kBoxes>(shared.sV[c], params.v, shared.full_v, item.kv_block + c, item.kv_head, item.batch);
  }

  ptx::RingPosition<Traits::kStages> ring;
  uint32_t steps = 0;
  const auto announce = [&](const Step& step, int next) {
    shared.sWanted[ring.stage] = step.wanted | next << kConsumers;
    if constexpr (Traits::kWithDq) {
      const uint32_t place = steps++ % Traits::kPlanSteps;
      shared.sPlan[place] = step;
      ptx::arrive(shared.planned[place]);
    }
  };

  const int heads = params.Hq / params.Hkv;
  for (int head = item.kv_head * heads; head < (item.kv_head + 1) * heads; ++head) {
    UnionWalk walk = walk_q_blocks(params, item, head);
    for (int q_block, wanted; walk.step(q_block, wanted); ring.advance()) {
      const int row_block = (item.batch * params.Hq + head) * params.Nq + q_block;
      ptx::wait(shared.empty[ring.stage], ring.parity ^ 1);
      // Consumers read lse and delta of the stage, the copy engine overwrites them. Nothing of this thread is under way
      // here that the fence would wait for: lists are read ahead behind it.
      ptx::fence_async_shared();
      announce({row_block, wanted}, walk.peek());
      ptx::Barrier& full = shared.full[ring.stage];
      ptx::arrive_expect_bytes(full, Traits::kStageBytes);
      load_row_block<kBoxes>(shared.sQ[ring.stage], params.q, full, q_block, head, item.batch);
      const int64_t first_row = int64_t{row_block} * kBlock;
      ptx::load_bytes(shared.sLse[ring.stage], params.lse_log2 + first_row, kBlock * sizeof(float), full);
      ptx::load_bytes(shared.sDelta[ring.stage], params.delta + first_row, kBlock * sizeof(float), full);
      load_row_block<kBoxes>(shared.sDout[ring.stage], params.dout, full, q_block, head, item.batch);
      walk.read_ahead(wanted);
    }
  }
  ptx::wait(shared.empty[ring.stage], ring.parity ^ 1);
  announce({0, 0}, 0);
  ptx::arrive(shared.full[ring.stage]);
}

}  // namespace vsa::sm90::bwd
