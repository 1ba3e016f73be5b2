// Copies into shared memory, and zeros behind the keys of a V tile.
#pragma once

#include "../../ptx/bulk.cuh"
#include "../../ptx/tma.cuh"
#include "schedule.cuh"

namespace vsa::sm100::fwd {

// The Loader, one thread: copies in the order in which the MmaIssuer takes them, V of a round after K of the next.
template <typename Traits>
class Loader {
 public:
  using T = typename Traits::T;

  __device__ Loader(const ForwardParams& params, SharedStorage<Traits>& shared)
      : params_(params), shared_(shared), heads_per_kv_head_(params.Hq / params.Hkv) {}

  __device__ void run() {
    RoundReader<Traits> rounds(params_, shared_);
    Round round{}, before{};  // no tiles
    WorkItem item{};          // of the round before
    while (true) {
      bool begins;
      const bool more = rounds.template next<true>(round, begins);
      if (begins) {
        load_values(before, item);
        if (!more) break;
        item = rounds.item(params_);
        load_queries(item);
      }
      load_keys(round, item);
      if (!begins) load_values(before, item);
      before = round;
    }
  }

 private:
  __device__ __forceinline__ void load_keys(const Round& round, const WorkItem& item) {
    load_round(shared_.sK, params_.k, shared_.k_full, shared_.k_full, shared_.k_empty, keys_, round, item);
  }

  __device__ __forceinline__ void load_values(const Round& round, const WorkItem& item) {
    load_round(shared_.sV, params_.v, shared_.v_full, shared_.v_raw, shared_.v_empty, values_, round, item);
  }

  // The tiles of a round; those that are not full complete `raw` in place of `full`.
  __device__ __forceinline__ void load_round(T (*tiles)[Traits::kTileElements], const CUtensorMap& map,
                                             ptx::Barrier* full, ptx::Barrier* raw, ptx::Barrier* empty,
                                             ptx::RingPosition<Traits::kStages>& ring, const Round& round,
                                             const WorkItem& item) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint32_t word = round.word(stream);
      if (word == 0 || (stream != 0 && round.is_shared())) continue;
      ptx::wait(empty[ring.stage], ring.parity ^ 1);
      ptx::Barrier& landed = Round::size(word) == kTile ? full[ring.stage] : raw[ring.stage];
      ptx::arrive_expect_bytes(landed, Traits::kTileBytes);
#pragma unroll
      for (int box = 0; box < Traits::kBoxes; ++box) {
        ptx::load_box(tiles[ring.stage] + box * Traits::kBoxElements, map, landed, box * kBoxColumns,
                      Round::tile(word) * kTile, item.head / heads_per_kv_head_, item.batch);
      }
      ring.advance();
    }
  }

  // Both stacks; rows that the head does not have arrive as zeros.
  __device__ __forceinline__ void load_queries(const WorkItem& item) {
    ptx::wait(shared_.q_empty, query_parity_ ^ 1);
    query_parity_ ^= 1;
    ptx::arrive_expect_bytes(shared_.q_full, kStreams * Traits::kQueryBytes);
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
      for (int i = 0; i < Traits::kBoxes * (kRows / kBoxRows); ++i) {
        const int box = i / (kRows / kBoxRows), rows = i % (kRows / kBoxRows);
        ptx::load_box(shared_.sQ[stream] + i * Traits::kBoxElements, params_.q, shared_.q_full, box * kBoxColumns,
                      (item.stack + stream) * kRows + rows * kBoxRows, item.head, item.batch);
      }
    }
  }

  const ForwardParams& params_;
  SharedStorage<Traits>& shared_;
  const int heads_per_kv_head_;
  ptx::RingPosition<Traits::kStages> keys_, values_;
  uint32_t query_parity_ = 0;
};

// The Clearer, one warp: writes zeros to the V rows past a tile's keys. They may hold anything, NaN too, and 0 * NaN is
// NaN. K needs nothing of the kind: what it gives are columns of S that the softmax replaces.
template <typename Traits>
__device__ void clear_values(const ForwardParams& params, SharedStorage<Traits>& shared, int lane) {
  constexpr int kPieceElements = 16 / sizeof(typename Traits::T);
  constexpr int kPiecesPerRow = kBoxColumns / kPieceElements;
  RoundReader<Traits> rounds(params, shared);
  uint32_t stage = 0;
  uint32_t parities = 0;  // bit per stage: v_raw completes a phase only with a partial tile
  Round round;
  bool begins;
  while (rounds.template next<false>(round, begins)) {
#pragma unroll 1
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint32_t word = round.word(stream);
      if (word == 0 || (stream != 0 && round.is_shared())) continue;
      if (Round::size(word) != kTile) {
        ptx::wait(shared.v_raw[stage], parities >> stage & 1);
        parities ^= 1u << stage;
        // Swizzling permutes pieces within a row: whole rows need no address arithmetic.
#pragma unroll 1
        for (int box = 0; box < Traits::kBoxes; ++box) {
          uint4* pieces = reinterpret_cast<uint4*>(shared.sV[stage] + box * Traits::kBoxElements);
#pragma unroll 1
          for (int piece = Round::size(word) * kPiecesPerRow + lane; piece < kTile * kPiecesPerRow; piece += kWarp) {
            pieces[piece] = uint4{0, 0, 0, 0};
          }
        }
        ptx::fence_async_shared();
        ptx::arrive_warp(shared.v_full[stage]);
      }
      if (++stage == Traits::kStages) stage = 0;
    }
  }
}

}  // namespace vsa::sm100::fwd
