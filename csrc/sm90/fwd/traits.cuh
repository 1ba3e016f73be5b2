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
// Neighbouring q tiles of a head, a consumer warpgroup each, that share the copies of kv tiles which both list.
constexpr int kConsumers = 2;
// Hardware barriers; 0 is __syncthreads.
enum NamedBarrier : uint32_t {
  kTurnOfConsumer0 = 1,  // it waits there; the other one arrives there when it passes the turn
  kTurnOfConsumer1 = 2,
};
// Kv tiles of one softmax. Two halve what a step costs besides products and exponentials; registers end there.
constexpr int kStepTiles = 2;
// Kv tiles that the scheduler reads of a list at a time, and that a record names to be copied at most: one a lane.
constexpr int kWindow = kWarp;
// Of a record, for each consumer. Half a window, should no two tiles be the same.
constexpr int kRecordTiles = kWindow / kConsumers;
// Tiles of one consumer alone that wait for tiles of the other: one more reading fits behind what is left of the last.
constexpr int kPending = 2 * kWindow;
// Records in flight: one that consumers work on, one that they look ahead into, and two that the scheduler, with three
// dependent global loads of about 600 cycles each to a record, is ahead of them.
constexpr int kRecords = 4;
constexpr int kMaxSharedBytes = 227 * 1024;

// A tile in the rings of K and V, as one word. A word of 0 is none: sizes are 1..kTile.
struct Entry {
  static constexpr int kMaxStages = 16;
  uint32_t word;

  // Slots count stages modulo both parities of a ring.
  template <int kKeyStages, int kValueStages>
  __device__ static Entry make(uint32_t key_slot, uint32_t value_slot, uint32_t size) {
    return {key_slot % kKeyStages | value_slot % kValueStages << 4 | key_slot / kKeyStages << 8 |
            value_slot / kValueStages << 9 | size << 10};
  }
  __device__ bool is_none() const { return word == 0; }
  __device__ uint32_t key_stage() const { return word & 0xf; }
  __device__ uint32_t value_stage() const { return word >> 4 & 0xf; }
  __device__ uint32_t key_parity() const { return word >> 8 & 1; }
  __device__ uint32_t value_parity() const { return word >> 9 & 1; }
  __device__ int size() const { return word >> 10; }
};

template <typename T_, int kHeadDim_, int kSubBlocks_, int kKeyStages_, int kValueStages_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kSubBlocks = kSubBlocks_;  // tiles in a block: block_size / kTile
  static constexpr int kKeyStages = kKeyStages_;  // K tiles in flight
  static constexpr int kValueStages = kValueStages_;

  static constexpr int kBoxes = kHeadDim / kBoxColumns;  // boxes side by side in a tile
  static constexpr int kBoxElements = kBoxColumns * kBoxRows;
  static constexpr int kTileElements = kTile * kHeadDim;
  static constexpr uint32_t kTileBytes = kTileElements * sizeof(T);
  static constexpr uint32_t kBoxBytes = kBoxElements * sizeof(T);

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // What setmaxnreg hands out: 64512 registers of 65536. At D = 128 a consumer holds O (64), Q (32), and for each tile
  // of a step S (32) and P (16).
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static_assert(sizeof(T) == 2, "bf16 or fp16");
  static_assert(kHeadDim == 64 || kHeadDim == 128, "whole boxes of columns, and an accumulator that fits");
  static_assert(kSubBlocks == 1 || kSubBlocks == 2, "blocks of 64 or 128 tokens");
  static_assert((kConsumers * kConsumerRegisters + kProducerRegisters) * kWarpgroup <= 65536,
                "the warpgroups own more registers than there are");
  static_assert(kKeyStages >= kConsumers * kStepTiles && kValueStages >= kConsumers * kStepTiles,
                "both consumers hold the tiles of a round, which none of them may share");
  static_assert(kKeyStages <= Entry::kMaxStages && kValueStages <= Entry::kMaxStages, "stages fit in an entry");
};

// A part of the schedule: tiles to copy, and rounds. In a round each consumer has a step of up to kStepTiles tiles.
struct Record {
  // A kv tile to copy: number | size << 20 | consumers that want it << 27. Numbers fit: offsets inside a head have 32
  // bits, so a head has at most 2^19 tiles.
  uint32_t loads[kWindow];
  Entry entries[kConsumers][kRecordTiles];  // by round and place in the step; none behind the last of a consumer
  uint32_t num_loads;
  uint32_t num_rounds;
  uint32_t last;  // of the work item
};

template <typename Traits>
struct alignas(1024) SharedStorage {
  // Tiles as boxes of 64 columns, each swizzled: 1024 bytes is the period of the pattern.
  alignas(1024) typename Traits::T sK[Traits::kKeyStages][Traits::kTileElements];
  alignas(1024) typename Traits::T sV[Traits::kValueStages][Traits::kTileElements];
  Record records[kRecords];
  ptx::Barrier k_full[Traits::kKeyStages], k_empty[Traits::kKeyStages];
  // A V tile that is not full of keys lands at v_raw; whoever clears the rest of it then completes v_full.
  ptx::Barrier v_full[Traits::kValueStages], v_empty[Traits::kValueStages], v_raw[Traits::kValueStages];
  ptx::Barrier record_full[kRecords], record_empty[kRecords];
  // The scheduler's own: tiles without a record yet, of consumer 0 alone, of consumer 1 alone, and of both.
  uint32_t pending[kConsumers + 1][kPending];

  __device__ void init_barriers() {
    constexpr int kConsumerWarps = kConsumers * kWarpsPerGroup;
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
        groups((q_tiles + kConsumers - 1) / kConsumers),
        count(params.B * params.Hq * groups) {}

  // How many this block has: blockIdx.x, blockIdx.x + gridDim.x, ... One at least: grids are no larger than `count`.
  __device__ int of_this_block() const {
    return (count - static_cast<int>(blockIdx.x) - 1) / static_cast<int>(gridDim.x) + 1;
  }

  // Consumers of an item that have a q tile: all but in the last group of a head.
  __device__ int active(const WorkItem<Traits>& item) const { return min(q_tiles - item.q_tile, kConsumers); }

  __device__ WorkItem<Traits> decode(const AttentionForwardParams& params, int item) const {
    const int row = item / groups;
    const int batch = row / params.Hq;
    return {batch, row - batch * params.Hq, row, (item - row * groups) * kConsumers};
  }
};

}  // namespace vsa::sm90::fwd
