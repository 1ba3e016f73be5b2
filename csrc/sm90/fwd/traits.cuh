// The numbers of the forward kernel, with reasons, and its plan of shared memory.
#pragma once

#include <cstdint>

#include "../../params.h"
#include "../../ptx/mbarrier.cuh"

namespace vsa::sm90::fwd {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kWarpsPerGroup = 4;
// Queries of a consumer and keys of a step: M of wgmma, and the smallest block. Larger blocks are walked as several of
// these, which is exact.
constexpr int kTile = 64;
static_assert(kTile == kBoxRows, "a tile is filled by boxes of its rows");
// Kv tiles that one schedule record can name: one a lane of the scheduler.
constexpr int kWindow = kWarp;
// Records in flight: one that consumers work on, one that they look ahead into, and two that the scheduler, with three
// dependent global loads of about 600 cycles each to a record, is ahead of them.
constexpr int kRecords = 4;
constexpr int kMaxSharedBytes = 227 * 1024;

// A tile in the rings of K and V, as one word. A word of 0 is none: sizes are 1..kTile.
struct Entry {
  static constexpr int kMaxStages = 16;
  static constexpr int kPositionBits = 15;
  uint32_t word;

  // Slots count stages modulo both parities of a ring. `position`: kv tiles copied before this one.
  template <int kKeyStages, int kValueStages>
  __device__ static Entry make(uint32_t key_slot, uint32_t value_slot, uint32_t size, uint32_t position) {
    return {key_slot % kKeyStages | value_slot % kValueStages << 4 | key_slot / kKeyStages << 8 |
            value_slot / kValueStages << 9 | size << 10 | position << 17};
  }
  __device__ bool is_end() const { return word == 0; }
  __device__ uint32_t key_stage() const { return word & 0xf; }
  __device__ uint32_t value_stage() const { return word >> 4 & 0xf; }
  __device__ uint32_t key_parity() const { return word >> 8 & 1; }
  __device__ uint32_t value_parity() const { return word >> 9 & 1; }
  __device__ int size() const { return word >> 10 & 0x7f; }
  // Differences are exact: far fewer than 2^14 tiles are named and not yet copied, or copied and not yet used.
  __device__ int copies_after(Entry other) const {
    return static_cast<int>((word >> 17) - (other.word >> 17) & (1 << kPositionBits) - 1);
  }
  // Whether it is among the first `count` tiles.
  __device__ bool is_before(uint32_t count) const {
    return static_cast<int>((count - (word >> 17)) << 32 - kPositionBits) > 0;
  }
};

// kConsumers: neighbouring q tiles of a head, sharing the copies of kv tiles that several of them list.
// kTilesPerStep: kv tiles of one softmax. Two halve what a step costs besides products and exponentials.
// kOverlap: scores of the next step are computed while the present probabilities are multiplied by V.
// kTakeTurns: consumers issue their products one after the other (Consumer::take_turn).
template <typename T_, int kHeadDim_, int kSubBlocks_, int kConsumers_, int kTilesPerStep_, bool kOverlap_,
          int kKeyStages_, int kValueStages_, bool kTakeTurns_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSubBlocks = kSubBlocks_;  // tiles in a block: block_size / kTile
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kTilesPerStep = kTilesPerStep_;
  static constexpr bool kOverlap = kOverlap_;
  static constexpr int kKeyStages = kKeyStages_;  // K tiles in flight
  static constexpr int kValueStages = kValueStages_;
  static constexpr bool kTakeTurns = kTakeTurns_;

  static constexpr int kBoxes = kHeadDim / kBoxColumns;  // boxes side by side in a tile
  static constexpr int kBoxElements = kBoxColumns * kBoxRows;
  static constexpr int kTileElements = kTile * kHeadDim;
  static constexpr uint32_t kTileBytes = kTileElements * sizeof(T);
  static constexpr uint32_t kBoxBytes = kBoxElements * sizeof(T);

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // What setmaxnreg hands out: 64512 registers of 65536 with two consumers, all with three. At D = 128 a consumer holds
  // O (64), Q (32), and for each tile of a step S (32) and P (16).
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  // Limits that keep consumers from waiting for each other in a circle: how many copies may lie between two tiles of a
  // step, and between the first tile of a step and the last of the step that is begun before the first is finished.
  // Proof in schedule.cuh.
  static constexpr int kStepReach = kKeyStages < kValueStages ? kKeyStages : kValueStages;
  static constexpr int kOverlapReach = kKeyStages + kValueStages;

  static_assert(sizeof(T) == 2, "bf16 or fp16");
  static_assert(kHeadDim == 64 || kHeadDim == 128, "whole boxes of columns, and an accumulator that fits");
  static_assert(kSubBlocks == 1 || kSubBlocks == 2, "blocks of 64 or 128 tokens");
  static_assert(kConsumers == 2 || kConsumers == 3, "the register split is stated for two and three consumers");
  static_assert(kTilesPerStep == 1 || kTilesPerStep == 2, "the last tile of an odd list is a step of its own");
  static_assert((kConsumers * kConsumerRegisters + kProducerRegisters) * kWarpgroup <= 65536,
                "the warpgroups own more registers than there are");
  static_assert(kStepReach >= 2 && kKeyStages <= Entry::kMaxStages && kValueStages <= Entry::kMaxStages,
                "rings, whose stages fit in an entry");
};

// What the scheduler found in a window of kWindow neighbouring kv tiles.
template <typename Traits>
struct Record {
  // A kv tile to copy: number | size << 20 | consumers that want it << 27. Numbers fit: offsets inside a head have 32
  // bits, so a head has at most 2^19 tiles.
  uint32_t loads[kWindow];
  Entry entries[Traits::kConsumers][kWindow];
  uint32_t num_loads;
  uint32_t num_entries[Traits::kConsumers];
  uint32_t last;  // of the work item
};

template <typename Traits>
struct alignas(1024) SharedStorage {
  // Tiles as boxes of 64 columns, each swizzled: 1024 bytes is the period of the pattern.
  alignas(1024) typename Traits::T sQ[Traits::kConsumers][Traits::kTileElements];
  alignas(1024) typename Traits::T sK[Traits::kKeyStages][Traits::kTileElements];
  alignas(1024) typename Traits::T sV[Traits::kValueStages][Traits::kTileElements];
  Record<Traits> records[kRecords];
  ptx::Barrier q_full[Traits::kConsumers], q_empty[Traits::kConsumers];
  ptx::Barrier k_full[Traits::kKeyStages], k_empty[Traits::kKeyStages];
  // A V tile that is not full of keys lands at v_raw; whoever clears the rest of it then completes v_full.
  ptx::Barrier v_full[Traits::kValueStages], v_empty[Traits::kValueStages], v_raw[Traits::kValueStages];
  ptx::Barrier record_full[kRecords], record_empty[kRecords];
  // Tiles whose copies were issued. A consumer learns of its tiles long before and does not look at the barriers of
  // others, so a barrier may be whole phases behind the one it wants, and the parity would deceive it. Once a copy is
  // issued, its stage was empty: the phase before is over.
  uint32_t k_issued, v_issued;
  uint32_t turn;  // 1 while a consumer issues products

  __device__ void init_barriers() {
    constexpr int kConsumerWarps = Traits::kConsumers * kWarpsPerGroup;
    k_issued = v_issued = turn = 0;
    for (int g = 0; g < Traits::kConsumers; ++g) {
      ptx::init_barrier(q_full[g], 1);
      ptx::init_barrier(q_empty[g], kWarpsPerGroup);
    }
    // Warps of consumers that do not want a tile are stood in for by who loads it.
    for (int stage = 0; stage < Traits::kKeyStages; ++stage) {
      ptx::init_barrier(k_full[stage], 1);
      ptx::init_barrier(k_empty[stage], kConsumerWarps);
    }
    for (int stage = 0; stage < Traits::kValueStages; ++stage) {
      ptx::init_barrier(v_full[stage], 1);
      ptx::init_barrier(v_raw[stage], 1);
      ptx::init_barrier(v_empty[stage], kConsumerWarps);
    }
    for (int record = 0; record < kRecords; ++record) {
      ptx::init_barrier(record_full[record], 1);
      // Consumer warps, the loaders of K and of V, the clearer of V.
      ptx::init_barrier(record_empty[record], kConsumerWarps + 3);
    }
    ptx::fence_barrier_init();
  }
};

// One (batch, head) and kConsumers neighbouring q tiles.
template <typename Traits>
struct WorkItem {
  int batch;
  int head;
  int row;     // batch * Hq + head
  int q_tile;  // of consumer 0
};

// Work items in the order of their numbers: heads outside, so that blocks that run at a time share K and V in L2.
template <typename Traits>
struct WorkItems {
  int q_tiles;  // of a head
  int groups;   // of a head
  int count;

  __device__ explicit WorkItems(const AttentionForwardParams& params)
      : q_tiles(params.Nq * Traits::kSubBlocks),
        groups((q_tiles + Traits::kConsumers - 1) / Traits::kConsumers),
        count(params.B * params.Hq * groups) {}

  // Consumers of an item that have a q tile: all but in the last group of a head.
  __device__ int active(const WorkItem<Traits>& item) const { return min(q_tiles - item.q_tile, Traits::kConsumers); }

  __device__ WorkItem<Traits> decode(const AttentionForwardParams& params, int item) const {
    const int row = item / groups;
    const int batch = row / params.Hq;
    return {batch, row - batch * params.Hq, row, (item - row * groups) * Traits::kConsumers};
  }
};

}  // namespace vsa::sm90::fwd
