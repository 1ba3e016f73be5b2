// Tile numbers, warp roles, shared memory, tensor memory and barriers of the sm_100a backward, each with its reason.
#pragma once

#include <cstdint>

#include "../../params.h"
#include "../../ptx/launch_control.cuh"
#include "../../ptx/mbarrier.cuh"
#include "params.h"

namespace vsa::sm100::bwd {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kWarpsOfGroup = kWarpgroup / kWarp;
constexpr int kElementBytes = 2;

// Tokens of a block, keys as well as queries; D; both fixed by the kernel's shape, since D is an M of tcgen05.mma.
constexpr int kBlock = 64;
constexpr int kHeadDim = 128;
static_assert(kBlock == kBoxRows && kHeadDim == 2 * kBoxColumns, "a kv block is two boxes of 64 tokens by 64 columns");

// Q blocks of a step: two of them are the 128 rows of the scores, one for each lane of tensor memory.
constexpr int kGroup = 2;
constexpr int kQueries = kGroup * kBlock;

// tcgen05.mma takes 16 of the summed dimension at a time.
constexpr int kDepth = 16;

constexpr int kBoxBytes = kBoxColumns * kBoxRows * kElementBytes;  // 64 keys by 64 columns of K or V
constexpr int kKeyBlockBytes = kBlock * kHeadDim * kElementBytes;  // K or V of a kv block: two boxes
constexpr int kPlaneBytes = kHeadDim * kBlock * kElementBytes;     // Q^T or dO^T of a q block: one box, 128 by 64
constexpr int kTileBytes = kQueries * kBlock * kElementBytes;      // P or dS of a step: 128 queries by 64 keys
constexpr int kSwizzleBytes = 1024;                                // 8 rows of 128 bytes: the period of the swizzle

// Shared memory of one block of sm_100, less the kilobyte that the system takes.
constexpr int kMaxSharedBytes = 227 * 1024;

constexpr int registers_at_launch(int threads) { return 65536 / threads / 8 * 8; }

// A work item: one kv block of one (batch, head), and its list of q blocks.
struct alignas(16) Item {
  int row;    // batch * H + head; -1 ends the walk
  int block;  // kv block
  int begin;  // of its list in the head's q_indices
  int count;  // of q blocks; 0 also where the block has no keys: nothing to give or to get
  int size;   // keys of the block

  __device__ __forceinline__ int steps() const { return (count + kGroup - 1) / kGroup; }
  // The q block at a place of a step. An odd list repeats its last one: the second half of the scores is then computed
  // twice and used once (mma_issuer.cuh).
  __device__ __forceinline__ int place(int step, int half) const { return min(step * kGroup + half, count - 1); }
  // How many q blocks of the step count.
  __device__ __forceinline__ int blocks(int step) const { return min(count - step * kGroup, kGroup); }
};

template <bool kLaunchControl_, typename Accumulator_ = float>
struct BackwardTraits {
  // Of dq in global memory: fp32, or fp16, which halves what goes through L2 and takes sums of up to 65504.
  using Accumulator = Accumulator_;
  // Where items come from: blocks of the grid that have not started (cluster launch control), or every gridDim.x-th.
  static constexpr bool kLaunchControl = kLaunchControl_;

  // Warpgroups: single warps, two of Compute, Drain, Epilogue. A warp reaches the 32 lanes of tensor memory that its
  // number modulo 4 says, so every role that touches it is a whole warpgroup.
  static constexpr int kSingles = 0, kFirstCompute = 1, kComputeGroups = 2, kDrain = 3, kEpilogue = 4;
  static constexpr int kLoaderWarp = 0, kIssuerWarp = 1, kSchedulerWarp = 2, kAllocatorWarp = 3;
  static constexpr int kThreads = 5 * kWarpgroup;
  static constexpr int kComputeWarps = kComputeGroups * kWarpsOfGroup;
  // The two Compute groups share the keys of a step, not its steps: half the latency between scores and dS.
  static constexpr int kKeysOfGroup = kBlock / kComputeGroups;

  // Compute holds 32 probabilities, 32 of dP, 16 packed, and the lse and delta of this step and the next; Drain and
  // Epilogue 32 values of tensor memory, or 32 pairs of keys. The single warps hold what ptxas gives one thread of
  // them.
  static constexpr int kSingleRegisters = 64;
  static constexpr int kComputeRegisters = 128;
  static constexpr int kDrainRegisters = 80;
  static constexpr int kEpilogueRegisters = 80;
  static_assert(kSingleRegisters + 2 * kComputeRegisters + kDrainRegisters + kEpilogueRegisters <=
                    kThreads / kWarpgroup * registers_at_launch(kThreads),
                "setmaxnreg would wait for registers that the block was not launched with");

  // Steps in shared memory: one that is worked on, one on its way. 64 KB each, three do not fit. Q^T and dO^T of a step
  // come and go apart, each as early as it can.
  static constexpr int kStages = 2;
  // Items announced: Epilogue is an item behind the others. More would be taken from other blocks too early.
  static constexpr int kItems = 2;
  // Pieces of dq of a Drain warp: 32 queries of its 32 head-dim columns. One is filled while another is reduced.
  static constexpr int kPieces = 2;
  static constexpr int kPieceQueries = 32;
  static constexpr int kPieceElements = kPieceQueries * kWarp;

  // Tensor memory. S and dP once: the products that overwrite them follow products that waited for Compute to have read
  // them. dq of a q block each, three of them: a step's two and one that Drain still reads. K^T as an operand: read
  // from shared memory by every step it would take 64 of the cycles in NOTES.md.
  static constexpr int kDqSlots = 3;
  static constexpr uint32_t kSColumn = 0;
  static constexpr uint32_t kDpColumn = kSColumn + kBlock;
  static constexpr uint32_t kDqColumn = kDpColumn + kBlock;
  static constexpr uint32_t kKeyColumn = kDqColumn + kDqSlots * kBlock;
  static constexpr uint32_t kKeyColumns = kBlock / 2;  // two keys a column
  static constexpr uint32_t kDvColumn = kKeyColumn + kKeyColumns;
  static constexpr uint32_t kDkColumn = kDvColumn + kBlock;
  static constexpr uint32_t kTensorColumns = 512;
  static_assert(kDkColumn + kBlock <= kTensorColumns, "a block has 512 columns");

  struct Shared {
    alignas(kSwizzleBytes) uint8_t sK[kKeyBlockBytes];  // [2 boxes][64 keys][64 columns]
    uint8_t sV[kKeyBlockBytes];
    uint8_t sQ[kStages][kGroup][kPlaneBytes];  // [128 head dim][64 queries], token contiguous
    uint8_t sDout[kStages][kGroup][kPlaneBytes];
    uint8_t sP[kTileBytes];   // [128 queries][64 keys]
    uint8_t sDs[kTileBytes];  // likewise
    Accumulator sDq[kWarpsOfGroup][kPieces][kPieceElements];
    Item sItem[kItems];
    ptx::CancelResponse response;
    ptx::Barrier full_item[kItems], empty_item[kItems];
    ptx::Barrier full_k, empty_k, full_v, empty_v;
    ptx::Barrier full_q[kStages], empty_q[kStages], full_dout[kStages], empty_dout[kStages];
    ptx::Barrier full_s, full_p, full_dp, full_ds;
    ptx::Barrier full_dq[kDqSlots], empty_dq[kDqSlots];
    ptx::Barrier full_key_operand, empty_key_operand;
    ptx::Barrier full_accumulators, empty_accumulators;
    ptx::Barrier full_response;
    uint32_t tensor_memory;  // address of the allocation
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a block can have");

  // Warps that read an item, each by itself: Loader, MmaIssuer, Compute, Drain, Epilogue.
  static constexpr int kItemReaders = 2 + kComputeWarps + 2 * kWarpsOfGroup;
};

}  // namespace vsa::sm100::bwd
