// The Epilogue, four warps: O of an item, divided by the sums, in T, and lse. It leaves O cleared: products may then
// accumulate from the first on, whichever rows that one is for, and rows without a tile are zeros.
#pragma once

#include "../../common/fragments.cuh"
#include "../../ptx/tcgen05_ld.cuh"
#include "schedule.cuh"

namespace vsa::sm100::fwd {

template <typename Traits>
class Epilogue {
  using T = typename Traits::T;
  static constexpr int kFragmentRows = 16;     // lanes of one load
  static constexpr int kFragmentColumns = 32;  // so that a quad writes 64 bytes of a row
  using Fragment = float[kFragmentColumns / 2];

 public:
  __device__ Epilogue(const ForwardParams& params, SharedStorage<Traits>& shared, int warp, int lane)
      : params_(params), shared_(shared), warp_(warp), lane_(lane) {}

  __device__ void run() {
    const WorkItems<Traits> items(params_);
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) hand_back(stream);
    uint32_t parity = 0;
    for (int number = blockIdx.x; number < items.count; number += gridDim.x, parity ^= 1) {
      const WorkItem item = items.decode(params_, number);
#pragma unroll 1
      for (int stream = 0; stream < kStreams; ++stream) {
        ptx::wait(shared_.o_full[stream], parity);
        ptx::wait(shared_.sums_full[stream], parity);
        ptx::fence_after_sync();
        store_rows(stream, item);
        hand_back(stream);
      }
    }
  }

 private:
  // Of this warp's 32 rows those that the head has: all or none, blocks being no smaller.
  __device__ __forceinline__ void store_rows(int stream, const WorkItem& item) {
    const int row_of_head = (item.stack + stream) * kRows + warp_ * kWarp;
    const int rows_of_head = params_.Nq * Traits::kBlockSize;
    if (row_of_head >= rows_of_head) return;
    const int64_t first = int64_t{item.row} * rows_of_head + row_of_head;
#pragma unroll 1
    for (int half = 0; half < kWarp / kFragmentRows; ++half) {
      const int row = half * kFragmentRows + lane_ / 4;  // and 8 further
      const float inverse[2] = {shared_.sInverse[stream][warp_ * kWarp + row],
                                shared_.sInverse[stream][warp_ * kWarp + row + 8]};
      T* out = static_cast<T*>(params_.out) + (first + row) * Traits::kHeadDim + lane_ % 4 * 8;
#pragma unroll 1
      for (int column = 0; column < Traits::kHeadDim; column += kFragmentColumns) {
        Fragment rO;
        ptx::load_fragments(rO, out_address(stream) + (half * kFragmentRows << 16) + column);
        ptx::await_loads(rO);
        store_fragment(out + column, rO, inverse);
      }
    }
    if (params_.lse_log2 != nullptr) {
      params_.lse_log2[first + lane_] = shared_.sLse[stream][warp_ * kWarp + lane_];
    }
  }

  __device__ __forceinline__ void store_fragment(T* out, const Fragment& rO, const float (&inverse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = rO + i * 4 + half * 2;
        words[i] = pack_pair<T>(pair[0] * inverse[half], pair[1] * inverse[half]);
      }
      transpose_quad(words, lane_);
      *reinterpret_cast<uint4*>(out + half * 8 * Traits::kHeadDim) = uint4{words[0], words[1], words[2], words[3]};
    }
  }

  // Clears O and gives it, and the sums, to the next item.
  __device__ __forceinline__ void hand_back(int stream) {
    constexpr int kStore = 32;
    const uint32_t zeros[kStore] = {};
#pragma unroll
    for (int column = 0; column < Traits::kHeadDim; column += kStore) {
      ptx::store_columns(out_address(stream) + column, zeros);
    }
    ptx::wait_stores();
    ptx::fence_before_sync();
    ptx::arrive_warp(shared_.o_empty[stream]);
  }

  __device__ __forceinline__ uint32_t out_address(int stream) const {
    return ptx::tensor_address(shared_.tensor_memory, warp_ * kWarp, stream * Traits::kHeadDim);
  }

  const ForwardParams& params_;
  SharedStorage<Traits>& shared_;
  const int warp_;
  const int lane_;
};

}  // namespace vsa::sm100::fwd
