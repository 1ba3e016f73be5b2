// The Loader, one thread: K and V of an item, Q^T and dO^T of its steps.
#pragma once

#include "../../ptx/tma.cuh"
#include "../../ptx/tma_plane.cuh"
#include "items.cuh"

namespace vsa::sm100::bwd {

// Two boxes of 64 tokens by 64 columns.
__device__ __forceinline__ void load_key_block(uint8_t* target, const CUtensorMap& map, ptx::Barrier& barrier,
                                               const BackwardParams& params, const Item& item) {
  const int batch = item.row / params.H;
  const int head = item.row - batch * params.H;
  ptx::arrive_expect_bytes(barrier, kKeyBlockBytes);
#pragma unroll
  for (int box = 0; box < kHeadDim / kBoxColumns; ++box) {
    ptx::load_box(target + box * kBoxBytes, map, barrier, box * kBoxColumns, item.block * kBlock, head, batch);
  }
}

// In the order in which places become free: dO^T of a step behind dv of two steps before, Q^T behind dk, V behind the
// last dP of the item before.
template <typename Traits>
__device__ void load(const BackwardParams& params, typename Traits::Shared& shared) {
  ItemReader<Traits, false> items(shared);
  uint32_t parity = 0;  // of K and V
  ptx::RingPosition<Traits::kStages> ring;
  Item item;
  while (items.next(item)) {
    if (item.count == 0) continue;
    const int* list = list_of(params, item);
    const int batch = item.row / params.H;
    const int first_token = batch * params.Nq * kBlock;
    const int first_row = (item.row - batch * params.H) * kHeadDim;
    const auto load_planes = [&](uint8_t (&target)[kGroup][kPlaneBytes], const CUtensorMap& map, ptx::Barrier& full,
                                 ptx::Barrier& empty, const int (&token)[kGroup]) {
      ptx::wait(empty, ring.parity ^ 1);
      ptx::arrive_expect_bytes(full, kGroup * kPlaneBytes);
#pragma unroll
      for (int half = 0; half < kGroup; ++half) ptx::load_plane(target[half], map, full, token[half], first_row);
    };

    ptx::wait(shared.empty_k, parity ^ 1);
    load_key_block(shared.sK, params.k, shared.full_k, params, item);
    for (int step = 0; step < item.steps(); ++step, ring.advance()) {
      const uint32_t stage = ring.stage;
      int token[kGroup];
#pragma unroll
      for (int half = 0; half < kGroup; ++half) {
        token[half] = first_token + __ldg(list + item.place(step, half)) * kBlock;
      }
      load_planes(shared.sDout[stage], params.dout_transposed, shared.full_dout[stage], shared.empty_dout[stage],
                  token);
      load_planes(shared.sQ[stage], params.q_transposed, shared.full_q[stage], shared.empty_q[stage], token);
      if (step == 0) {
        ptx::wait(shared.empty_v, parity ^ 1);
        load_key_block(shared.sV, params.v, shared.full_v, params, item);
      }
    }
    parity ^= 1;
  }
}

}  // namespace vsa::sm100::bwd
