// The dq pass: dq of two neighbouring q blocks of a (batch, head), over the union of their lists of kv blocks.
//
//   sK, sV [stages][64, D]   one kv block of the union
//   rQ, rDout [64, D]        operands of a consumer, in registers from start to end
//   rS  [64 queries, 64 keys]  Q K^T, then P = exp2(S sm_scale_log2 - lse_log2)
//   rDp [64 queries, 64 keys]  dO V^T, then dS = P (dP - delta)
//   dq += dS K with dS as register operand
//
//   Producer    Q, dO; K, V of each step ---> full[stage]    waits empty[stage]
//   Consumer c  dq of q block c ------------> empty[stage]
//
// Queries are rows, so that dS is an operand as it stands in registers; no block adds to what another one writes, and
// the order of the sum is that of the list: the bits are the same on every run. It computes S and dP a second time, 7
// products for the 5 of the fused kernel. The accumulator has the order of dkdv_reducer.cuh.
#pragma once

#include "../../ptx/bulk.cuh"
#include "../../ptx/named_barrier.cuh"
#include "../../ptx/registers.cuh"
#include "../../ptx/warp.cuh"
#include "fragments.cuh"
#include "lists.cuh"
#include "loads.cuh"
#include "products.cuh"

namespace vsa::sm90::bwd {

struct DqItem {
  int batch;
  int head;
  int q_block;  // of consumer 0
  int blocks;   // 1 in the last item of a head with an odd number of blocks
};

inline int dq_items_of_head(const AttentionBackwardParams& params) { return (params.Nq + kConsumers - 1) / kConsumers; }

// Heads outside, so that blocks that run at a time share K and V in L2.
__device__ __forceinline__ DqItem dq_item(const AttentionBackwardParams& params, int number) {
  const int items = (params.Nq + kConsumers - 1) / kConsumers;
  const int row = number / items;
  const int q_block = (number - row * items) * kConsumers;
  const int batch = row / params.Hq;
  return {batch, row - batch * params.Hq, q_block, min(kConsumers, params.Nq - q_block)};
}

template <typename Traits>
__device__ void produce_keys(const AttentionBackwardParams& params, typename Traits::Shared& shared,
                             const DqItem& item) {
  constexpr int kBoxes = Traits::kBoxes;
  ptx::arrive_expect_bytes(shared.full_rows, 2 * item.blocks * Traits::kRowBlockBytes);
  const int64_t first_row = (int64_t{item.batch} * params.Hq + item.head) * params.Nq + item.q_block;
  UnionWalk walk(params.kv_indices + first_row * params.M);
  for (int c = 0; c < kConsumers; ++c) {
    const bool exists = c < item.blocks;
    const int begin = c * params.M;
    walk.start(c, begin, begin + (exists ? params.kv_num_blocks[first_row + c] : 0));
    if (!exists) continue;
    load_row_block<kBoxes>(shared.sQ[c], params.q, shared.full_rows, item.q_block + c, item.head, item.batch);
    load_row_block<kBoxes>(shared.sDout[c], params.dout, shared.full_rows, item.q_block + c, item.head, item.batch);
  }

  const int kv_head = item.head / (params.Hq / params.Hkv);
  ptx::RingPosition<Traits::kStages> ring;
  for (;;) {
    const Step step = walk.step();
    if (step.wanted == 0) break;
    const int size = __ldg(params.kv_block_sizes + step.block);
    if (size == 0) continue;
    ptx::wait(shared.empty[ring.stage], ring.parity ^ 1);
    shared.sWanted[ring.stage] = step.wanted;
    shared.sSize[ring.stage] = size;
    ptx::Barrier& full = shared.full[ring.stage];
    ptx::arrive_expect_bytes(full, 2 * Traits::kRowBlockBytes);
    load_row_block<kBoxes>(shared.sK[ring.stage], params.k, full, step.block, kv_head, item.batch);
    load_row_block<kBoxes>(shared.sV[ring.stage], params.v, full, step.block, kv_head, item.batch);
    ring.advance();
  }
  ptx::wait(shared.empty[ring.stage], ring.parity ^ 1);
  shared.sWanted[ring.stage] = 0;
  ptx::arrive(shared.full[ring.stage]);
}

// dS, packed as A operands, from scores and dP of [queries, keys] fragments; lse and delta of the thread's two rows.
// Keys from `size` on get 0: selected, not multiplied, since they may be NaN.
template <typename T, bool kPartial>
__device__ __forceinline__ void differentiate_rows(uint32_t (&rDs)[4][4], const float (&rS)[32], const float (&rDp)[32],
                                                   const float (&lse)[2], const float (&delta)[2], float sm_scale_log2,
                                                   int size, int quad) {
#pragma unroll
  for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float ds[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * j + 2 * h + i;
        ds[i] = exp2_approximate(fmaf(rS[at], sm_scale_log2, -lse[h])) * (rDp[at] - delta[h]);
        if (kPartial && 8 * j + 2 * quad + i >= size) ds[i] = 0;
      }
      rDs[j / 2][2 * (j % 2) + h] = pack_pair<T>(ds[0], ds[1]);
    }
  }
}

// Zeros K rows that are no keys, once for both consumers if both want the block: 0 * NaN is NaN in dS K.
template <typename Traits>
__device__ __forceinline__ void clear_keys(typename Traits::Shared& shared, int stage, int wanted, int consumer,
                                           int thread) {
  const bool both = wanted == kBothConsumers;
  if (!both || consumer == 0) {
    clear_tile_rows<Traits::kBoxes>(shared.sK[stage], shared.sSize[stage], thread);
    ptx::fence_async_shared();
  }
  __syncwarp();
  if (both) {
    ptx::sync_named<kConsumers * kWarpgroup>(kAllConsumers);
  } else if (consumer == 0) {
    ptx::sync_named<kWarpgroup>(kConsumer0);
  } else {
    ptx::sync_named<kWarpgroup>(kConsumer1);
  }
}

template <typename Traits>
__device__ void consume_keys(const AttentionBackwardParams& params, typename Traits::Shared& shared, const DqItem& item,
                             int consumer, int thread) {
  using T = typename Traits::T;
  constexpr int kHeadDim = Traits::kHeadDim;
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;
  const bool exists = consumer < item.blocks;
  const int64_t row_block = (int64_t{item.batch} * params.Hq + item.head) * params.Nq + item.q_block + consumer;

  uint32_t rQ[kHeadDim / kDepth][4], rDout[kHeadDim / kDepth][4];
  float lse[2] = {}, delta[2] = {};
  ptx::wait(shared.full_rows, 0);
  __syncwarp();
  if (exists) {
    load_fragments<kHeadDim>(rQ, shared.sQ[consumer], thread);
    load_fragments<kHeadDim>(rDout, shared.sDout[consumer], thread);
    for (int h = 0; h < 2; ++h) {
      const int64_t row = row_block * kBlock + warp * 16 + h * 8 + lane / 4;
      lse[h] = params.lse_log2[row];
      delta[h] = params.delta[row];
    }
  }

  float rDq[kHeadDim / 2] = {};
  ptx::RingPosition<Traits::kStages> ring;
  for (;; ring.advance()) {
    ptx::wait(shared.full[ring.stage], ring.parity);
    const int wanted = shared.sWanted[ring.stage];
    if (wanted == 0) break;
    if (wanted >> consumer & 1) {
      const int size = shared.sSize[ring.stage];
      if (size < kBlock) clear_keys<Traits>(shared, ring.stage, wanted, consumer, thread);
      float rS[32], rDp[32];
      uint32_t rDs[4][4];
      __syncwarp();  // lanes left the waits one by one
      ptx::fence_products();
      multiply_rows<T, kHeadDim>(rS, rQ, shared.sK[ring.stage]);
      multiply_rows<T, kHeadDim>(rDp, rDout, shared.sV[ring.stage]);
      ptx::commit_products();
      ptx::wait_products<0>();
      ptx::hold_registers(rS);
      ptx::hold_registers(rDp);
      if (size < kBlock) {
        differentiate_rows<T, true>(rDs, rS, rDp, lse, delta, params.sm_scale_log2, size, lane % 4);
      } else {
        differentiate_rows<T, false>(rDs, rS, rDp, lse, delta, params.sm_scale_log2, size, lane % 4);
      }
      ptx::fence_products();
      accumulate_rows<T, kHeadDim>(rDq, rDs, shared.sK[ring.stage]);
      ptx::commit_products();
      ptx::wait_products<0>();
      ptx::hold_registers(rDq);
    }
    __syncwarp();
    if (ptx::elect_one()) ptx::arrive(shared.empty[ring.stage]);
  }

  if (!exists) return;
  float4* target =
      reinterpret_cast<float4*>(params.dq_accum + (row_block * kWarpsOfGroup + warp) * kPieceRows * kHeadDim);
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
    target[j * kWarp + lane] = float4{rDq[4 * j], rDq[4 * j + 1], rDq[4 * j + 2], rDq[4 * j + 3]};
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    dq_kernel(const __grid_constant__ AttentionBackwardParams params) {
  extern __shared__ __align__(kSwizzleAlignment) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int group = __shfl_sync(ptx::kWholeWarp, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int thread = threadIdx.x % kWarpgroup;
  const DqItem item = dq_item(params, blockIdx.x);

  if (threadIdx.x == 0) {
    ptx::init_barrier(shared.full_rows, 1);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::init_barrier(shared.full[stage], 1);
      ptx::init_barrier(shared.empty[stage], kConsumers * kWarpsOfGroup);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  if (group == Traits::kProducer) {
    ptx::shrink_registers<Traits::kProducerRegisters>();
    if (thread == 0) produce_keys<Traits>(params, shared, item);
  } else {
    ptx::grow_registers<Traits::kConsumerRegisters>();
    consume_keys<Traits>(params, shared, item, group - Traits::kFirstConsumer, thread);
  }
}

}  // namespace vsa::sm90::bwd
