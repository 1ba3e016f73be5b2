// In which order the sm_100a backward takes its work items, and when that is worth a kernel. Any order gives right
// results. Host code without CUDA, except `launch_order`.
#pragma once

#include <cstdint>

#include "../checks.h"

namespace vsa::sm100 {

constexpr int kWorkBlock = 64;  // tokens of a block

// Numbers of the plan. Tests lower them; builds use the defaults.
struct WorkThresholds {
  // Kv blocks of a sequence from which on their order is worth a launch of its own (published).
  int64_t ordered_blocks = 1024;
  // Accumulator elements of a column of dq, in bytes, from which on dq no longer stays in L2 by itself (published):
  // 262144 tokens in fp32, 524288 in fp16. The main kernel is then launched in waves of a block a multiprocessor.
  int64_t wave_bytes = int64_t{1} << 20;
};

// Lists within one bin count as equally long. Wider bins above the L2 transition: there more blocks in the order of the
// sequence matter more than the end of the launch (published numbers).
constexpr int kBinWidth = 8;
constexpr int kWaveBinWidth = 12;

// Two ints of shared memory a kv block, of the 227 KB a block may have, beside a few for scans.
constexpr int kOrderIntsOfBlock = 2;
constexpr int kOrderFixedBytes = 256;
constexpr int kMaxOrderedBlocks = (227 * 1024 - kOrderFixedBytes) / (kOrderIntsOfBlock * 4);
// What a kernel may have without asking.
constexpr int kSharedWithoutOptIn = 48 * 1024;

constexpr int order_shared_bytes(int64_t kv_blocks) { return static_cast<int>(kv_blocks * kOrderIntsOfBlock * 4); }

enum class WorkOrder { kIdentity, kDevice, kExplicit };

// What a launcher does. `snake`: order.cuh.
struct WorkPlan {
  WorkOrder order;
  bool waves;
  int bin_width;
  bool snake;
};

// Static half of the rule below: at the published thresholds every launch in waves has an order.
static_assert(WorkThresholds{}.wave_bytes / 4 / kWorkBlock >= WorkThresholds{}.ordered_blocks,
              "sequences in waves of fp32 would be in the order of identity");

// Waves without an order: a wave would then be a run of neighbours with the same hot dq, what waves are meant to avoid.
inline void expect_order_of_waves(const WorkPlan& plan) {
  if (plan.waves && plan.order == WorkOrder::kIdentity) {
    refuse("work_order", "the order of identity for a launch in waves",
           "an order computed on the device, or a given one");
  }
}

// The plan for `kv_blocks` a sequence and `tokens` queries of it. Refuses what no order can be computed for.
inline WorkPlan plan_work(int64_t kv_blocks, int64_t tokens, int64_t accumulator_bytes, bool order_given,
                          const WorkThresholds& thresholds = {}) {
  WorkPlan plan{};
  plan.waves = tokens * accumulator_bytes >= thresholds.wave_bytes;
  plan.bin_width = plan.waves ? kWaveBinWidth : kBinWidth;
  plan.snake = plan.waves;
  plan.order = order_given                              ? WorkOrder::kExplicit
               : kv_blocks >= thresholds.ordered_blocks ? WorkOrder::kDevice
                                                        : WorkOrder::kIdentity;
  if (plan.order == WorkOrder::kDevice && kv_blocks > kMaxOrderedBlocks) {
    refuse("k.shape[2]", text(kv_blocks, " blocks of ", kWorkBlock, " tokens"),
           text("at most ", kMaxOrderedBlocks, ", or any number with work_order given"));
  }
  expect_order_of_waves(plan);
  return plan;
}

// Bytes of the order of `rows` (batch, head) pairs; 0 where none is computed.
inline int64_t order_bytes(const WorkPlan& plan, int64_t rows, int64_t kv_blocks) {
  return plan.order == WorkOrder::kDevice ? rows * kv_blocks * int64_t{sizeof(int)} : 0;
}

struct OrderParams {
  const int* q_offsets;  // [rows, Nkv + 1], of vsa::transpose_blocks
  int* order;            // [rows * Nkv], every element written: item (row * Nkv + kv block) of each place
  int rows, Nq, Nkv;     // rows: B * H
  int bin_width;
  bool snake;
};

// Launches the order kernel on `stream` of the current device; Nkv <= kMaxOrderedBlocks. Throws on any CUDA error.
void launch_order(const OrderParams& params, cudaStream_t stream);

}  // namespace vsa::sm100
