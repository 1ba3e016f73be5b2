// The other warps of the producer warpgroup: copies of K, copies of V, and zeros for V rows that are no keys.
#pragma once

#include "../../ptx/bulk.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warp.cuh"
#include "traits.cuh"

namespace vsa::sm90::fwd {

// A tile of a record's `loads`.
struct Load {
  uint32_t word;
  __device__ int row() const { return static_cast<int>(word & 0xfffff) * kTile; }
  __device__ int size() const { return static_cast<int>(word >> 20 & 0x7f); }
  __device__ uint32_t wanted() const { return word >> 27; }
};

// The schedule as a whole warp reads it: `on_item(item)`, then `on_load(load)` for every copy, item after item.
template <typename Traits, typename OnItem, typename OnLoad>
__device__ __forceinline__ void follow_schedule(const AttentionForwardParams& params, SharedStorage<Traits>& shared,
                                                OnItem on_item, OnLoad on_load) {
  const WorkItems<Traits> items(params);
  ptx::RingPosition<kRecords> ring;
  for (int number = blockIdx.x; number < items.count; number += gridDim.x) {
    on_item(items.decode(params, number));
    bool last;
    do {
      const Record& record = shared.records[ring.stage];
      ptx::wait(shared.record_full[ring.stage], ring.parity);
      last = record.last != 0;
      const uint32_t count = record.num_loads;
      for (uint32_t i = 0; i < count; ++i) on_load(Load{record.loads[i]});
      ptx::arrive_warp(shared.record_empty[ring.stage]);
      ring.advance();
    } while (!last);
  }
}

// Copies 64 rows from `row` on of one (batch, head), box by box. By one thread.
template <typename Traits>
__device__ __forceinline__ void copy_tile(typename Traits::T* tile, const CUtensorMap& map, ptx::Barrier& landed,
                                          int row, int head, int batch) {
  ptx::arrive_expect_bytes(landed, Traits::kTileBytes);
#pragma unroll
  for (int box = 0; box < Traits::kBoxes; ++box) {
    ptx::load_box(tile + box * Traits::kBoxElements, map, landed, box * kBoxColumns, row, head, batch);
  }
}

// One ring of tiles, as its loader sees it.
template <typename Traits, int kStages>
class Loader {
 public:
  using T = typename Traits::T;

  __device__ Loader(T (*tiles)[Traits::kTileElements], ptx::Barrier* empty)
      : tiles_(tiles), empty_(empty), leader_(ptx::elect_one()) {}

  // Copies a tile, to complete full[stage].
  __device__ __forceinline__ void load(const CUtensorMap& map, ptx::Barrier* full, Load load, int head, int batch) {
    ptx::wait(empty_[ring_.stage], ring_.parity ^ 1);
    if (leader_) {
      copy_tile<Traits>(tiles_[ring_.stage], map, full[ring_.stage], load.row(), head, batch);
      const uint32_t others = kConsumers - load.wanted();
      if (others != 0) ptx::arrive(empty_[ring_.stage], others * kWarpsPerGroup);
    }
    ring_.advance();
  }

 private:
  T (*const tiles_)[Traits::kTileElements];
  ptx::Barrier* const empty_;
  const bool leader_;
  ptx::RingPosition<kStages> ring_;
};

// All tiles of K or of V, one after the other; `full(load)` are the barriers that the copy of a tile completes.
template <typename Traits, int kStages, typename Full>
__device__ __forceinline__ void load_tiles(const AttentionForwardParams& params, SharedStorage<Traits>& shared,
                                           const CUtensorMap& map, typename Traits::T (*tiles)[Traits::kTileElements],
                                           ptx::Barrier* empty, Full full) {
  Loader<Traits, kStages> loader(tiles, empty);
  const int heads_per_kv_head = params.Hq / params.Hkv;
  int kv_head = 0, batch = 0;
  follow_schedule(
      params, shared,
      [&](const WorkItem<Traits>& item) {
        kv_head = item.head / heads_per_kv_head;
        batch = item.batch;
      },
      [&](Load load) { loader.load(map, full(load), load, kv_head, batch); });
}

template <typename Traits>
__device__ void load_keys(const AttentionForwardParams& params, SharedStorage<Traits>& shared) {
  load_tiles<Traits, Traits::kKeyStages>(params, shared, params.k, shared.sK, shared.k_empty,
                                         [&](Load) { return shared.k_full; });
}

template <typename Traits>
__device__ void load_values(const AttentionForwardParams& params, SharedStorage<Traits>& shared) {
  load_tiles<Traits, Traits::kValueStages>(params, shared, params.v, shared.sV, shared.v_empty, [&](Load load) {
    return load.size() == kTile ? shared.v_full : shared.v_raw;
  });
}

// Writes zeros to the V rows past a tile's keys. They may hold anything, NaN too, and 0 * NaN is NaN.
template <typename Traits>
__device__ void clear_values(const AttentionForwardParams& params, SharedStorage<Traits>& shared, int lane) {
  uint32_t stage = 0;
  uint32_t parities = 0;  // bit per stage: v_raw completes a phase only with a partial tile
  constexpr int kPieceElements = 16 / sizeof(typename Traits::T);
  constexpr int kPiecesPerRow = kBoxColumns / kPieceElements;
  follow_schedule(
      params, shared, [](const WorkItem<Traits>&) {},
      [&](Load load) {
        // Swizzling permutes pieces within a row: whole rows need no address arithmetic.
        if (load.size() != kTile) {
          ptx::wait(shared.v_raw[stage], parities >> stage & 1);
          parities ^= 1u << stage;
#pragma unroll 1
          for (int box = 0; box < Traits::kBoxes; ++box) {
            uint4* pieces = reinterpret_cast<uint4*>(shared.sV[stage] + box * Traits::kBoxElements);
#pragma unroll 1
            for (int piece = load.size() * kPiecesPerRow + lane; piece < kTile * kPiecesPerRow; piece += kWarp) {
              pieces[piece] = uint4{0, 0, 0, 0};
            }
          }
          ptx::fence_async_shared();
          ptx::arrive_warp(shared.v_full[stage]);
        }
        if (++stage == Traits::kValueStages) stage = 0;
      });
}

}  // namespace vsa::sm90::fwd
