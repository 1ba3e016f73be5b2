// What the fused kernel needs before it runs: zeros in dq's accumulator, and the order of its work items.
//
// Within a head, items are sorted by the lengths of their lists, longest first. That evens out the end of the launch,
// and it matters more that blocks which run at a time then take equally long: they begin at the first q block together
// and stay together, so that the Q, dO and dq of the q blocks they are at fit in L2. At 131072 tokens (8 heads, D 128)
// this alone took the kernel from 345 to 500 TFLOPS. Any order gives right results.
#pragma once

#include "dkdv_item.cuh"

namespace vsa::sm90::bwd {

constexpr int kPrepareThreads = 1024;
constexpr int kBins = kPrepareThreads;  // of lengths: one a thread in the scan

// q blocks that the item visits, over all query heads of its kv head; those that both kv blocks want count twice.
__device__ __forceinline__ int item_length(const AttentionBackwardParams& params, const DkdvItem& item) {
  const int heads = params.Hq / params.Hkv;
  int length = 0;
  for (int head = item.kv_head * heads; head < (item.kv_head + 1) * heads; ++head) {
    const int64_t row = int64_t{item.batch} * params.Hq + head;
    const int* offsets = params.q_offsets + row * (params.Nkv + 1) + item.kv_block;
    for (int c = 0; c < item.blocks; ++c) {
      if (params.kv_block_sizes[item.kv_block + c] != 0) length += offsets[c + 1] - offsets[c];
    }
  }
  return length;
}

// Sorts the items of one (batch, kv head) into bins by length. order[i] is the item of the i-th block of the launch.
__device__ __forceinline__ void order_items(const AttentionBackwardParams& params, int row, int* order) {
  __shared__ int starts[kBins];
  const int thread = threadIdx.x;
  const int items = dkdv_items_of_head(params);
  const int64_t longest = int64_t{kConsumers} * params.Nq * (params.Hq / params.Hkv);
  const auto bin_of = [&](int item) {
    const int64_t length = item_length(params, dkdv_item(params, row * items + item));
    return static_cast<int>((longest - length) * (kBins - 1) / longest);
  };
  starts[thread] = 0;
  __syncthreads();
  for (int item = thread; item < items; item += kPrepareThreads) atomicAdd(&starts[bin_of(item)], 1);
  __syncthreads();
  const int own = starts[thread];
  for (int distance = 1; distance < kBins; distance *= 2) {
    const int before = thread >= distance ? starts[thread - distance] : 0;
    __syncthreads();
    starts[thread] += before;
    __syncthreads();
  }
  starts[thread] -= own;
  __syncthreads();
  for (int item = thread; item < items; item += kPrepareThreads) {
    order[row * items + atomicAdd(&starts[bin_of(item)], 1)] = row * items + item;
  }
}

// The first `ordered_rows` blocks order a (batch, kv head) each, the others zero `vectors` of the accumulator.
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ AttentionBackwardParams params, int ordered_rows, int64_t vectors) {
  const int block = static_cast<int>(blockIdx.x) - ordered_rows;
  if (block < 0) {
    order_items(params, blockIdx.x, static_cast<int*>(params.workspace));
    return;
  }
  float4* accumulator = reinterpret_cast<float4*>(params.dq_accum);
  const int64_t stride = int64_t{gridDim.x - ordered_rows} * kPrepareThreads;
  for (int64_t i = int64_t{block} * kPrepareThreads + threadIdx.x; i < vectors; i += stride) {
    accumulator[i] = float4{0, 0, 0, 0};
  }
}

}  // namespace vsa::sm90::bwd
