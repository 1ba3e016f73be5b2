// What the fused kernel needs before it runs: zeros in dq's accumulator, and its work items in the order in which they
// are to run. Any pairs in any order give right results.
//
// Within a head, items are sorted by what they cost, most first. That evens out the end of the launch, and it matters
// more that blocks which run at a time then take equally long: they begin at the first q block together and stay
// together, so that the Q, dO and dq of the q blocks they are at fit in L2. At 131072 tokens (8 heads, D 128) this
// alone took the kernel from 345 to 500 TFLOPS.
#pragma once

#include "pairing.cuh"

namespace vsa::sm90::bwd {

constexpr int kPrepareThreads = kPairingThreads;
constexpr int kBins = kPrepareThreads;  // of costs: one a thread in the scan

// What is in params.workspace.
struct Schedule {
  KvPair* items;  // as the fused kernel takes them
  KvPair* unsorted;
  int* costs;

  __device__ __forceinline__ explicit Schedule(const AttentionBackwardParams& params) {
    const int64_t count = int64_t{params.B} * params.Hkv * dkdv_items_of_head(params);
    items = static_cast<KvPair*>(params.workspace);
    unsorted = items + count;
    costs = reinterpret_cast<int*>(unsorted + count);
  }
  static constexpr int kBytesOfItem = 2 * sizeof(KvPair) + sizeof(int);
};

// The first `pairing_blocks` blocks pair a group of kv blocks each, the others zero `vectors` of the accumulator.
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ AttentionBackwardParams params, int pairing_blocks, int64_t vectors) {
  __shared__ Pairing::Shared shared;
  const int block = static_cast<int>(blockIdx.x) - pairing_blocks;
  if (block < 0) {
    const Schedule schedule(params);
    Pairing(params, shared, blockIdx.x).run(schedule.unsorted, schedule.costs);
    return;
  }
  float4* accumulator = reinterpret_cast<float4*>(params.dq_accum);
  const int64_t stride = int64_t{gridDim.x - pairing_blocks} * kPrepareThreads;
  for (int64_t i = int64_t{block} * kPrepareThreads + threadIdx.x; i < vectors; i += stride) {
    accumulator[i] = float4{0, 0, 0, 0};
  }
}

// Sorts the items of a (batch, kv head) into bins by cost.
__global__ void __launch_bounds__(kPrepareThreads)
    order_kernel(const __grid_constant__ AttentionBackwardParams params) {
  __shared__ int starts[kBins];
  const int thread = threadIdx.x;
  const int count = dkdv_items_of_head(params);
  const Schedule schedule(params);
  const int64_t first = int64_t{blockIdx.x} * count;
  const int64_t most = int64_t{2} * kConsumers * params.Nq * (params.Hq / params.Hkv);
  const auto bin_of = [&](int item) {
    return static_cast<int>((most - schedule.costs[first + item]) * (kBins - 1) / most);
  };
  starts[thread] = 0;
  __syncthreads();
  for (int item = thread; item < count; item += kPrepareThreads) atomicAdd(&starts[bin_of(item)], 1);
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
  for (int item = thread; item < count; item += kPrepareThreads) {
    schedule.items[first + atomicAdd(&starts[bin_of(item)], 1)] = schedule.unsorted[first + item];
  }
}

}  // namespace vsa::sm90::bwd
