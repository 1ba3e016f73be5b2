// The numbers of the forward kernel, with reasons, and its plans of shared and tensor memory.
#pragma once

#include <cstdint>

#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tcgen05_alloc.cuh"
#include "params.h"

namespace vsa::sm100::fwd {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kWarpsOfGroup = kWarpgroup / kWarp;
// Depth of one tcgen05.mma of 16-bit elements.
constexpr int kDepth = 16;
// Keys of a step, and the smallest block. Larger blocks are walked as several of these, which is exact.
constexpr int kTile = 64;
static_assert(kTile == kBoxRows, "a tile is filled by boxes of its rows");
// Queries of a stream: M of tcgen05.mma, a lane of tensor memory and a thread of its Softmax warpgroup each. M = 64
// would take as long.
constexpr int kRows = 128;
static_assert(kRows == ptx::kTensorLanes, "a query has a lane");
// Streams of a block: while the tensor core works for one, the other has its softmax. More do not fit in tensor memory.
constexpr int kStreams = 2;
constexpr int kMaxSharedBytes = 227 * 1024;

template <typename T_, int kBlockSize_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kHeadDim = 128;
  static constexpr int kBlockSize = kBlockSize_;
  static constexpr int kTilesOfBlock = kBlockSize / kTile;
  // Q blocks stacked in a stream; each has its own list. A tile that only one of them lists still occupies the tensor
  // core for both: union / (sum / 2) of the time that it would ideally take.
  static constexpr int kParts = kRows / kBlockSize;

  static constexpr int kBoxes = kHeadDim / kBoxColumns;  // boxes side by side in a tile
  static constexpr int kBoxElements = kBoxColumns * kBoxRows;
  static constexpr uint32_t kBoxBytes = kBoxElements * sizeof(T);
  static constexpr int kTileElements = kTile * kHeadDim;
  static constexpr uint32_t kTileBytes = kTileElements * sizeof(T);
  static constexpr int kQueryElements = kRows * kHeadDim;
  static constexpr uint32_t kQueryBytes = kQueryElements * sizeof(T);
  static constexpr uint32_t kQueryBoxBytes = kRows * kBoxColumns * sizeof(T);  // all rows of 64 columns

  // K and V tiles in flight, of 16 KB each: all that two Q tiles of 32 KB leave of 227 KB. A round takes up to two.
  static constexpr int kStages = 5;
  // Rounds announced: the scheduler, with two dependent global loads of about 600 cycles each to a window of a list, is
  // that far ahead; a round of two tiles takes the tensor core 1280 cycles.
  static constexpr int kRounds = 8;
  // Scores of a stream: one buffer is computed while the softmax has the other.
  static constexpr int kScores = 2;

  // Warpgroups: single warps, a Softmax for each stream, Epilogue. A warp reaches the 32 lanes of tensor memory that
  // its number modulo 4 says, so every role that touches it is a whole warpgroup.
  static constexpr int kSchedulerWarp = 0, kLoaderWarp = 1, kIssuerWarp = 2, kClearerWarp = 3;
  static constexpr int kSingles = 0, kFirstSoftmax = 1, kEpilogue = kFirstSoftmax + kStreams;
  static constexpr int kThreads = (kEpilogue + 1) * kWarpgroup;
  // What setmaxnreg hands out: all 65536 registers. Softmax holds 64 scores and 32 packed pairs. The single warps get
  // what is left: with 72 ptxas 13.0 spills for sm_103a.
  static constexpr int kSingleRegisters = 104;
  static constexpr int kSoftmaxRegisters = 152;
  static constexpr int kEpilogueRegisters = 104;

  // Tensor memory: O of both streams, then S, 64 columns each; P, two elements a column, lies over its S.
  static constexpr uint32_t kScoreColumn = kStreams * kHeadDim;
  static constexpr uint32_t kScoreColumns = kTile;
  static constexpr uint32_t kTensorColumns = 512;

  static_assert(sizeof(T) == 2, "bf16 or fp16");
  static_assert(kBlockSize == 64 || kBlockSize == 128, "a stream is one or two q blocks");
  static_assert(kSingleRegisters + kStreams * kSoftmaxRegisters + kEpilogueRegisters <= 65536 / kWarpgroup,
                "the warpgroups own more registers than there are");
  static_assert(kStages >= 2 * kStreams, "V of a round is held until the products with K of the next");
  static_assert(kScoreColumn + kStreams * kScores * kScoreColumns <= kTensorColumns, "a block has 512 columns");
};

// What the streams do at a time, in one word each: a tile of keys, the same one or two.
struct Round {
  // kv tile | its keys << 20 | parts that list it << 27; 0 is no tile. Numbers fit: offsets inside a head have 32 bits,
  // so a head has at most 2^18 tiles.
  uint32_t words[kStreams];
  uint32_t last;  // of the work item

  __device__ static uint32_t make(int tile, int size, int parts) {
    return static_cast<uint32_t>(tile) | static_cast<uint32_t>(size) << 20 | static_cast<uint32_t>(parts) << 27;
  }
  __device__ static int tile(uint32_t word) { return static_cast<int>(word & 0xfffff); }
  __device__ static int size(uint32_t word) { return static_cast<int>(word >> 20 & 0x7f); }
  __device__ static uint32_t parts(uint32_t word) { return word >> 27; }

  // Of a stream that is no constant: selected, as an index would put the round in local memory.
  __device__ uint32_t word(int stream) const { return stream == 0 ? words[0] : words[1]; }
  __device__ bool is_shared() const { return words[0] != 0 && words[1] != 0 && tile(words[0]) == tile(words[1]); }
};

template <typename Traits>
struct alignas(1024) SharedStorage {
  // Boxes of 64 columns, each swizzled: 1024 bytes is the period of the pattern.
  alignas(1024) typename Traits::T sQ[kStreams][Traits::kQueryElements];  // [2 boxes][128 rows][64 columns]
  typename Traits::T sK[Traits::kStages][Traits::kTileElements];          // [2 boxes][64 rows][64 columns]
  typename Traits::T sV[Traits::kStages][Traits::kTileElements];
  // Of each row, when an item ends.
  float sInverse[kStreams][kRows];  // 1 / sum, 0 where there was no key
  float sLse[kStreams][kRows];
  Round rounds[Traits::kRounds];
  ptx::Barrier round_full[Traits::kRounds], round_empty[Traits::kRounds];
  ptx::Barrier q_full, q_empty;
  ptx::Barrier k_full[Traits::kStages], k_empty[Traits::kStages];
  // A V tile that is not full of keys lands at v_raw; whoever clears the rest of it then completes v_full.
  ptx::Barrier v_full[Traits::kStages], v_empty[Traits::kStages], v_raw[Traits::kStages];
  ptx::Barrier s_full[kStreams][Traits::kScores], p_full[kStreams][Traits::kScores];
  // Products of P and V are done: O is up to date, P may be overwritten.
  ptx::Barrier s_empty[kStreams][Traits::kScores];
  ptx::Barrier o_full[kStreams], o_empty[kStreams], sums_full[kStreams];
  uint32_t tensor_memory;  // address of the allocation

  __device__ void init_barriers() {
    for (int i = 0; i < Traits::kRounds; ++i) {
      ptx::init_barrier(round_full[i], 1);
      // The warps of Softmax, the loaders, the MmaIssuer and the Clearer.
      ptx::init_barrier(round_empty[i], kStreams * kWarpsOfGroup + 3);
    }
    ptx::init_barrier(q_full, 1);
    ptx::init_barrier(q_empty, 1);
    for (int i = 0; i < Traits::kStages; ++i) {
      ptx::init_barrier(k_full[i], 1);
      ptx::init_barrier(k_empty[i], 1);
      ptx::init_barrier(v_full[i], 1);
      ptx::init_barrier(v_raw[i], 1);
      ptx::init_barrier(v_empty[i], 1);
    }
    for (int stream = 0; stream < kStreams; ++stream) {
      for (int i = 0; i < Traits::kScores; ++i) {
        ptx::init_barrier(s_full[stream][i], 1);
        ptx::init_barrier(p_full[stream][i], kWarpsOfGroup);
        ptx::init_barrier(s_empty[stream][i], 1);
      }
      ptx::init_barrier(o_full[stream], 1);
      ptx::init_barrier(o_empty[stream], kWarpsOfGroup);
      ptx::init_barrier(sums_full[stream], kWarpsOfGroup);
    }
    ptx::fence_barrier_init();
  }
};

// One (batch, head) and kStreams neighbouring stacks of kRows queries.
struct WorkItem {
  int batch;
  int head;
  int row;    // batch * Hq + head
  int stack;  // of stream 0, in the head
};

// Work items in the order of their numbers: heads outside, so that blocks that run at a time share K and V in L2.
template <typename Traits>
struct WorkItems {
  int groups;  // of a head
  int count;

  __device__ explicit WorkItems(const ForwardParams& params)
      : groups((params.Nq + kStreams * Traits::kParts - 1) / (kStreams * Traits::kParts)),
        count(params.B * params.Hq * groups) {}

  __device__ WorkItem decode(const ForwardParams& params, int item) const {
    const int row = item / groups;
    const int batch = row / params.Hq;
    return {batch, row - batch * params.Hq, row, (item - row * groups) * kStreams};
  }
};

}  // namespace vsa::sm100::fwd
