// The order kernel: a (batch, head)'s kv blocks sorted into bins by the length of their lists, longest first.
//
//   a block of kOrderThreads per row; sWords [2][Nkv]: (bin << 16 | kv block), sorted from one half into the other
//   bin = (Nq - length) / bin_width
//
// Within a bin kv blocks keep the order of the sequence, neighbours together: they share q blocks, which L2 then holds.
// With `snake` they run from the middle of the sequence outwards, sides in turns, and in every second bin inwards: a
// bin begins where the one before it ended, and what is between two waves is a step and not a jump.
//
// The sort is a stable split by one bit of the bin at a time, lowest first: no atomics, so the same order on every run.
// Threads own runs of neighbouring words. 8192 blocks with full lists (524288 tokens): 10 splits of 8 words a thread.
#pragma once

#include "order.h"

namespace vsa::sm100 {

constexpr int kOrderThreads = 1024;  // a row has a multiprocessor to itself, and there are few rows
constexpr int kOrderWarps = kOrderThreads / 32;
constexpr int kBinShift = 16;
static_assert(kMaxOrderedBlocks <= 1 << kBinShift, "a word holds the number of a kv block in its lower half");

struct OrderShared {
  int sums[kOrderWarps];
};
static_assert(sizeof(OrderShared) <= kOrderFixedBytes, "the most blocks leave room for less");

// The kv block at a place of the walk from the middle of the sequence outwards.
__device__ __forceinline__ int outwards(int place, int blocks) {
  const int step = (place + 1) / 2;
  return place % 2 == 0 ? blocks / 2 + step : blocks / 2 - step;
}

// Sum over the threads before this one; `total` over all. Every thread of the block calls it, with a barrier between
// two calls.
__device__ __forceinline__ int sum_before(int own, OrderShared& shared, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == 31) shared.sums[warp] = sum;
  __syncthreads();
  // Every warp sums the sums of all: one barrier less than one warp doing it for the others.
  int of_warps = shared.sums[lane];
#pragma unroll
  for (int distance = 1; distance < kOrderWarps; distance *= 2) {
    const int before = __shfl_up_sync(~0u, of_warps, distance);
    if (lane >= distance) of_warps += before;
  }
  total = __shfl_sync(~0u, of_warps, kOrderWarps - 1);
  const int before_warp = __shfl_sync(~0u, of_warps, warp == 0 ? 0 : warp - 1);
  return (warp == 0 ? 0 : before_warp) + sum - own;
}

// A stable split of this thread's words [first, last) by one bit.
__device__ __forceinline__ void split(const int* sFrom, int* sTo, int first, int last, int bit, OrderShared& shared) {
  int zeros = 0;
  for (int i = first; i < last; ++i) zeros += (sFrom[i] >> bit & 1) == 0;
  int all_zeros = 0;
  int zero_at = sum_before(zeros, shared, all_zeros);
  int one_at = all_zeros + first - zero_at;
  for (int i = first; i < last; ++i) {
    const int word = sFrom[i];
    sTo[(word >> bit & 1) == 0 ? zero_at++ : one_at++] = word;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kOrderThreads) order_kernel(const __grid_constant__ OrderParams params) {
  extern __shared__ int sWords[];
  __shared__ OrderShared shared;
  const int blocks = params.Nkv;
  const int thread = threadIdx.x;
  const int* offsets = params.q_offsets + int64_t{blockIdx.x} * (blocks + 1);
  // With far more queries than keys the last bin takes the rest: it has to be the number of a kv block (below).
  const int last_bin = min(params.Nq / params.bin_width, blocks - 1);
  for (int place = thread; place < blocks; place += kOrderThreads) {
    const int block = params.snake ? outwards(place, blocks) : place;
    const int length = offsets[block + 1] - offsets[block];
    sWords[place] = min((params.Nq - length) / params.bin_width, last_bin) << kBinShift | block;
  }
  __syncthreads();
  const int run = (blocks + kOrderThreads - 1) / kOrderThreads;
  const int first = min(thread * run, blocks), last = min(first + run, blocks);
  int *sFrom = sWords, *sTo = sWords + blocks;
  for (int bits = last_bin, bit = kBinShift; bits != 0; bits >>= 1, ++bit) {
    split(sFrom, sTo, first, last, bit, shared);
    int* const sSorted = sTo;
    sTo = sFrom, sFrom = sSorted;
  }
  // Of each bin where it begins and ends, in the half that is free.
  uint16_t *sBegin = reinterpret_cast<uint16_t*>(sTo), *sEnd = sBegin + blocks;
  for (int i = first; i < last; ++i) {
    const int bin = sFrom[i] >> kBinShift;
    if (i == 0 || sFrom[i - 1] >> kBinShift != bin) sBegin[bin] = static_cast<uint16_t>(i);
    if (i == blocks - 1 || sFrom[i + 1] >> kBinShift != bin) sEnd[bin] = static_cast<uint16_t>(i);
  }
  __syncthreads();
  const int64_t row_first = int64_t{blockIdx.x} * blocks;
  for (int i = thread; i < blocks; i += kOrderThreads) {
    const int bin = sFrom[i] >> kBinShift;
    const int block = sFrom[i] & ((1 << kBinShift) - 1);
    const int place = params.snake && bin % 2 == 1 ? sBegin[bin] + sEnd[bin] - i : i;
    params.order[row_first + place] = static_cast<int>(row_first) + block;
  }
}

}  // namespace vsa::sm100
