// Which work item a block has, and the lists of q blocks that selected its kv blocks: a pair of lists for each query
// head of the kv head.
#pragma once

#include "lists.cuh"
#include "traits.cuh"

namespace vsa::sm90::bwd {

__host__ __device__ inline int dkdv_items_of_head(const AttentionBackwardParams& params) {
  return (params.Nkv + kConsumers - 1) / kConsumers;
}

// Heads outside, so that blocks that run at a time share Q, dO and dq in L2. `pairs`: of all items, in the order in
// which they are to run; neighbours where there are none.
__device__ __forceinline__ DkdvItem dkdv_item(const AttentionBackwardParams& params, int number, const KvPair* pairs) {
  const int items = dkdv_items_of_head(params);
  const int row = number / items;
  const int first = (number - row * items) * kConsumers;
  const KvPair neighbours{{first, first + 1 < params.Nkv ? first + 1 : -1}};
  const KvPair pair = pairs == nullptr ? neighbours : pairs[number];
  const int batch = row / params.Hkv;
  return {batch, row - batch * params.Hkv, pair, pair.block[1] < 0 ? 1 : kConsumers};
}

// The walk over the q blocks of one (batch, query head), the `row`-th, that selected a kv block of the item. A block
// without keys has nothing to give or to get: its list counts as empty.
__device__ __forceinline__ UnionWalk walk_q_blocks(const AttentionBackwardParams& params, const DkdvItem& item,
                                                   int64_t row) {
  const int* offsets = params.q_offsets + row * (params.Nkv + 1);
  UnionWalk walk(params.q_indices + row * params.Nq * params.M);
#pragma unroll
  for (int c = 0; c < kConsumers; ++c) {
    const int block = item.kv.block[c];
    const bool empty = c >= item.blocks || params.kv_block_sizes[block] == 0;
    walk.start(c, empty ? 0 : offsets[block], empty ? 0 : offsets[block + 1]);
  }
  return walk;
}

}  // namespace vsa::sm90::bwd
