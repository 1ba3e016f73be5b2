// Tile numbers, warp roles, shared memory and barriers of the backward kernels, each with its reason.
#pragma once

#include <cstdint>

#include "../../params.h"
#include "../../ptx/mbarrier.cuh"

namespace vsa::sm90::bwd {

// Tokens of a block, keys as well as queries: the height of a wgmma tile, and of a box of an operand map.
constexpr int kBlock = 64;
static_assert(kBlock == kBoxRows, "a block is one row of boxes");

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kWarpsOfGroup = kWarpgroup / kWarp;
constexpr int kElementBytes = 2;

// A block takes two blocks of its resident operand, one a consumer warpgroup. Their lists are walked as one union, so
// that what both of them want is loaded once, and in the fused kernel its dq is summed before it is reduced.
constexpr int kConsumers = 2;
constexpr int kBothConsumers = (1 << kConsumers) - 1;  // as a set: bit c is consumer c

// Hardware barriers; 0 is __syncthreads.
enum NamedBarrier : uint32_t {
  kConsumer0 = 1,  // the warps of one consumer, and of the next under the next number
  kConsumer1 = 2,
  kAllConsumers = 3,
};

// What a box of an operand map leaves in shared memory.
constexpr int kBoxBytes = kBoxColumns * kBoxRows * kElementBytes;

// wgmma takes 16 of the summed dimension at a time.
constexpr int kDepth = 16;

// Shared memory of one block of sm_90, less the kilobyte that the system takes.
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kSwizzleAlignment = 1024;  // of tiles with 128-byte swizzle

// Registers of a thread when a block of this size, one on a multiprocessor, is launched: multiples of 8. setmaxnreg
// hands out what the block was launched with, and no more: 504 for each lane column of three warpgroups, 512 of four.
constexpr int registers_at_launch(int threads) { return 65536 / threads / 8 * 8; }

// dq goes to shared memory and from there into the accumulator in pieces of 64 columns and of the 16 rows that a warp
// has of a wgmma tile.
constexpr int kPieceRows = 16;
constexpr int kPieceFloats = kPieceRows * kBoxColumns;

// A step of a walk over the union of the consumers' lists.
struct Step {
  int block;   // of the streamed operand
  int wanted;  // bit c: consumer c wants it; 0 ends the walk
};

// The kv blocks of a work item, of one head; the second is -1 where there is none.
struct KvPair {
  int block[kConsumers];
};

// A work item of the fused kernel: two kv blocks of one (batch, kv head), one a consumer.
struct DkdvItem {
  int batch;
  int kv_head;
  KvPair kv;
  int blocks;  // 1 in one item of a head with an odd number of blocks
};

// The fused kernel: dk and dv of two kv blocks, and their share of dq unless kWithDq is false.
template <typename T_, int kHeadDim_, bool kWithDq_>
struct DkdvTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kWithDq = kWithDq_;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "products are one or two boxes wide");

  static constexpr int kBoxes = kHeadDim / kBoxColumns;
  static constexpr int kRowBlockBytes = kBoxes * kBoxBytes;

  // Warpgroups: Producer, two Consumers, Reducer. Of the first, warp 0 is the Producer itself, warp 1 the Drainer (a
  // lane for each warp of the Reducer), warp 2 the Publisher (a lane for each consumer), warp 3 the Scheduler (a lane).
  static constexpr int kProducer = 0, kFirstConsumer = 1, kReducer = 3;
  static constexpr int kProducerWarp = 0, kDrainerWarp = 1, kPublisherWarp = 2, kSchedulerWarp = 3;
  static constexpr int kThreads = kWarpgroup * (kWithDq ? 4 : 3);

  // At D 128 a consumer holds 128 accumulators of dk and dv, 32 of the scores or dP, 16 of P, and some 30 addresses and
  // temporaries: with 200 registers ptxas serialises the products. The Reducer holds 32 of dq.
  static constexpr int kProducerRegisters = kWithDq ? 32 : 40;
  static constexpr int kConsumerRegisters = kWithDq ? 208 : 232;
  static constexpr int kReducerRegisters = 64;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters + (kWithDq ? kReducerRegisters : 0) <=
                    kThreads / kWarpgroup * registers_at_launch(kThreads),
                "setmaxnreg would wait for registers that the block was not launched with");

  // K and V as register operands of S and dP, where there is room: what bounds the kernel is what passes through shared
  // memory (NOTES.md), and a product of 64 by 64 reads as much of A as of B.
  static constexpr bool kKeysInRegisters = kHeadDim == 64;

  // Q and dO of a q block are a stage. D 128: what is left beside K, V (64 KB), dS and dq (64 KB). D 64: a step is half
  // as long, the latency of its loads is not.
  static constexpr int kStages = kHeadDim == 128 ? 3 : 5;
  // dS tiles of a consumer: one that the Reducer multiplies, one that is being written.
  static constexpr int kSlots = 2;
  // Steps that the Scheduler may be ahead of the Drainer: a consumer is at most kSlots of its own steps ahead of the
  // Reducer, so that all of them together pass at most kConsumers * kSlots + 1 steps, the stages are ahead of those,
  // and the Reducer is kPieces ahead of the Drainer, each a step where D is 64. Publishers keep to the step of the one
  // that the Reducer waits for.
  static constexpr int kPlanSteps = 16;
  static_assert(kPlanSteps > kStages + kConsumers * kSlots + 1 + 2,
                "the Scheduler would overwrite a step still needed");

  // Pieces of dq of a warp of the Reducer: one is written while the one before is being reduced.
  static constexpr int kPieces = 2;
  static_assert(kPieces == 2, "the Drainer frees the other one");

  struct Shared {
    alignas(kSwizzleAlignment) uint8_t sK[kConsumers][kRowBlockBytes];
    uint8_t sV[kConsumers][kRowBlockBytes];
    uint8_t sQ[kStages][kRowBlockBytes];
    uint8_t sDout[kStages][kRowBlockBytes];
    // dS^T [keys, queries] of one consumer: columns are queries, 128-byte swizzle.
    uint8_t sDs[kWithDq ? kConsumers : 0][kSlots][kBoxBytes];
    alignas(16) float sDq[kWithDq ? kWarpsOfGroup : 0][kPieces][kPieceFloats];
    alignas(16) float sLse[kStages][kBlock];
    alignas(16) float sDelta[kStages][kBlock];
    int sWanted[kStages];               // Step::wanted of the stage
    alignas(8) Step sPlan[kPlanSteps];  // q blocks counted over all (batch, head): which rows of dq, lse and delta
    DkdvItem item;
    ptx::Barrier full[kStages], empty[kStages];
    ptx::Barrier full_k, full_v;
    ptx::Barrier full_ds[kConsumers][kSlots], visible_ds[kConsumers][kSlots], empty_ds[kConsumers][kSlots];
    ptx::Barrier full_dq[kWarpsOfGroup][kPieces], empty_dq[kWarpsOfGroup][kPieces];
    ptx::Barrier planned[kPlanSteps];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a block can have");

  static constexpr uint32_t kStageBytes = 2 * kRowBlockBytes;
};

// The dq pass: dq of two q blocks without reductions, bitwise the same on every run.
template <typename T_, int kHeadDim_>
struct DqTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "products are one or two boxes wide");

  static constexpr int kBoxes = kHeadDim / kBoxColumns;
  static constexpr int kRowBlockBytes = kBoxes * kBoxBytes;

  // Warpgroups: Producer, two Consumers. At D 128 a consumer holds Q and dO (64), dq (64), scores and dP (64), dS (16).
  static constexpr int kProducer = 0, kFirstConsumer = 1;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= kThreads / kWarpgroup * registers_at_launch(kThreads),
                "setmaxnreg would wait for registers that the block was not launched with");

  // K and V of a kv block are a stage: as many as fit beside Q and dO, which are read once.
  static constexpr int kStages = kHeadDim == 128 ? 4 : 6;

  struct Shared {
    alignas(kSwizzleAlignment) uint8_t sQ[kConsumers][kRowBlockBytes];
    uint8_t sDout[kConsumers][kRowBlockBytes];
    uint8_t sK[kStages][kRowBlockBytes];
    uint8_t sV[kStages][kRowBlockBytes];
    int sWanted[kStages];  // bit c: consumer c wants it; 0 ends the walk
    int sSize[kStages];    // keys of the block
    alignas(8) ptx::Barrier full[kStages];
    ptx::Barrier empty[kStages];
    ptx::Barrier full_rows;  // Q and dO
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= kMaxSharedBytes, "more shared memory than a block can have");
};

}  // namespace vsa::sm90::bwd
