// Compute, eight warps: probabilities and dS of a step, from tensor memory to shared memory.
//
// A thread has one query of the step (a lane of tensor memory) and 32 of the 64 keys, so lse and delta are two
// registers and a row of P is 64 bytes: four swizzled 16-byte stores without bank conflicts.
#pragma once

#include "../../common/softmax.cuh"
#include "items.cuh"
#include "tensor_memory.cuh"

namespace vsa::sm100::bwd {

// lse and delta of a query.
struct Statistics {
  float lse_log2;
  float delta;
};

// `q_block`: in its head.
__device__ __forceinline__ Statistics load_statistics(const BackwardParams& params, const Item& item, int q_block,
                                                      int query) {
  const int64_t row = (int64_t{item.row} * params.Nq + q_block) * kBlock + query % kBlock;
  return {__ldg(params.lse_log2 + row), __ldg(params.delta + row)};
}

// Scores to probabilities.
template <int kKeys>
__device__ __forceinline__ void exponentiate(float (&rP)[kKeys], float scale_log2, float lse_log2) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) rP[i] = exp2_approximate(fmaf(rP[i], scale_log2, -lse_log2));
}

// dP to dS.
template <int kKeys>
__device__ __forceinline__ void differentiate(float (&rDp)[kKeys], const float (&rP)[kKeys], float delta) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) rDp[i] = rP[i] * (rDp[i] - delta);
}

// Zeros for what is no key. Selected, not multiplied: its K and V may be NaN.
template <int kKeys>
__device__ __forceinline__ void mask_keys(float (&values)[kKeys], int first, int size) {
  if (first + kKeys <= size) return;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) values[i] = first + i < size ? values[i] : 0.0f;
}

// kKeys values of one query, as bf16, into its row of a tile of 128-byte rows with 128-byte swizzle.
template <int kKeys>
__device__ __forceinline__ void store_row(uint8_t* tile, const float (&values)[kKeys], int query, int first) {
  constexpr int kOfVector = sizeof(uint4) / kElementBytes;
  uint4* row = reinterpret_cast<uint4*>(tile + query * kBlock * kElementBytes);
#pragma unroll
  for (int c = 0; c < kKeys / kOfVector; ++c) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = pack_pair<__nv_bfloat16>(values[c * kOfVector + 2 * i], values[c * kOfVector + 2 * i + 1]);
    }
    row[(first / kOfVector + c) ^ (query % 8)] = uint4{packed[0], packed[1], packed[2], packed[3]};
  }
}

template <typename Traits>
__device__ void compute(const BackwardParams& params, typename Traits::Shared& shared, int group, int thread) {
  constexpr int kKeys = Traits::kKeysOfGroup;
  const int warp = thread / kWarp;
  const int first = group * kKeys;
  const uint32_t tS = shared.tensor_memory + Traits::kSColumn + first;
  const uint32_t tDp = shared.tensor_memory + Traits::kDpColumn + first;
  ItemReader<Traits, true> items(shared);
  uint32_t parity = 0;  // of steps: there is one of everything
  Item item;
  while (items.next(item)) {
    const int* list = list_of(params, item);
    // Statistics are read a step ahead, the ids behind their addresses two: nobody waits for either.
    const auto q_block_of = [&](int step) {
      return __ldg(list + item.place(min(step, item.steps() - 1), thread / kBlock));
    };
    int q_block = 0;
    Statistics next{};
    if (item.count > 0) {
      q_block = q_block_of(1);
      next = load_statistics(params, item, q_block_of(0), thread);
    }
    for (int step = 0; step < item.steps(); ++step, parity ^= 1) {
      const Statistics statistics = next;
      next = load_statistics(params, item, q_block, thread);
      q_block = q_block_of(step + 2);

      // S was issued behind dv of the step before and is counted with it: P may be overwritten.
      ptx::wait(shared.full_s, parity);
      ptx::fence_after_sync();
      __syncwarp();
      float rP[kKeys];
      read_columns(rP, tS, warp);
      ptx::fence_before_sync();
      exponentiate(rP, params.sm_scale_log2, statistics.lse_log2);
      mask_keys(rP, first, item.size);
      store_row(shared.sP, rP, thread, first);
      ptx::arrive_warp(shared.full_p);

      // Likewise dP behind dk and dq, which read dS.
      ptx::wait(shared.full_dp, parity);
      ptx::fence_after_sync();
      __syncwarp();
      float rDp[kKeys];
      read_columns(rDp, tDp, warp);
      ptx::fence_before_sync();
      differentiate(rDp, rP, statistics.delta);
      mask_keys(rDp, first, item.size);
      store_row(shared.sDs, rDp, thread, first);
      ptx::arrive_warp(shared.full_ds);
    }
  }
}

}  // namespace vsa::sm100::bwd
