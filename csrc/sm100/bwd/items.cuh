// The Scheduler, one thread: which item is next. And how every other role learns it.
#pragma once

#include "../../ptx/bulk.cuh"
#include "../../ptx/warp.cuh"
#include "traits.cuh"

namespace vsa::sm100::bwd {

__device__ __forceinline__ Item item_at(const BackwardParams& params, int place) {
  const int number = params.order == nullptr ? params.first + place : __ldg(params.order + params.first + place);
  Item item;
  item.row = number / params.Nkv;
  item.block = number - item.row * params.Nkv;
  const int* offsets = params.q_offsets + int64_t{item.row} * (params.Nkv + 1) + item.block;
  item.begin = __ldg(offsets);
  item.size = __ldg(params.kv_block_sizes + item.block);
  item.count = item.size == 0 ? 0 : __ldg(offsets + 1) - item.begin;
  return item;
}

template <typename Traits>
__device__ void schedule(const BackwardParams& params, typename Traits::Shared& shared) {
  ptx::RingPosition<Traits::kItems> ring;
  const auto announce = [&](const Item& item) {
    ptx::wait(shared.empty_item[ring.stage], ring.parity ^ 1);
    shared.sItem[ring.stage] = item;
    ptx::arrive(shared.full_item[ring.stage]);
    ring.advance();
  };
  if constexpr (Traits::kLaunchControl) {
    uint32_t parity = 0;
    for (int place = blockIdx.x; place >= 0; parity ^= 1) {
      ptx::arrive_expect_bytes(shared.full_response, ptx::kCancelResponseBytes);
      ptx::try_cancel(shared.response, shared.full_response);
      announce(item_at(params, place));
      ptx::wait(shared.full_response, parity);
      place = ptx::canceled_block(shared.response);
      ptx::fence_async_shared();
    }
  } else {
    for (int place = blockIdx.x; place < params.items; place += gridDim.x) announce(item_at(params, place));
  }
  announce(Item{-1, 0, 0, 0, 0});
}

// An item after the other, of one reader: a whole warp, or one thread of it.
template <typename Traits, bool kWholeWarp>
class ItemReader {
 public:
  __device__ __forceinline__ explicit ItemReader(typename Traits::Shared& shared) : shared_(shared) {}

  // False at the end.
  __device__ __forceinline__ bool next(Item& item) {
    ptx::wait(shared_.full_item[ring_.stage], ring_.parity);
    item = shared_.sItem[ring_.stage];
    if constexpr (kWholeWarp) {
      ptx::arrive_warp(shared_.empty_item[ring_.stage]);
    } else {
      ptx::arrive(shared_.empty_item[ring_.stage]);
    }
    ring_.advance();
    return item.row >= 0;
  }

 private:
  typename Traits::Shared& shared_;
  ptx::RingPosition<Traits::kItems> ring_;
};

// The list of an item.
__device__ __forceinline__ const int* list_of(const BackwardParams& params, const Item& item) {
  return params.q_indices + int64_t{item.row} * params.Nq * params.M + item.begin;
}

}  // namespace vsa::sm100::bwd
