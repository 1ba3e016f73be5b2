// A consumer warpgroup: attention of one q tile over the tiles that the scheduler named for it.
//
// With kOverlap the order of a step is FlashAttention-3's (Shah et al., 2024): the scores of the next step are issued
// before the products of the present one with V, and the softmax of the next runs while the tensor cores do the latter.
// Without it a step needs fewer registers, and only other warpgroups fill the tensor cores during softmax.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/matrix.cuh"
#include "../../ptx/named_barrier.cuh"
#include "../../ptx/shared_lock.cuh"
#include "../../ptx/wgmma.cuh"
#include "epilogue.cuh"
#include "schedule.cuh"

namespace vsa::sm90::fwd {

template <typename Traits>
class Consumer {
  using T = typename Traits::T;
  static constexpr int kScoreValues = kTile / 2;                // of a thread and tile: 64 x 64 over 128 threads
  static constexpr int kOutValues = Traits::kHeadDim / 2;       // likewise
  static constexpr int kScoreProducts = Traits::kHeadDim / 16;  // of depth 16
  static constexpr int kValueProducts = kTile / 16;
  static constexpr int kProductsPerBox = kBoxColumns / 16;
  static constexpr int kWhole = Traits::kTilesPerStep;
  static constexpr unsigned kTurnNanoseconds = 20;

  using Out = float[kOutValues];
  template <int kTiles>
  using Scores = float[kTiles][kScoreValues];
  using Probabilities = uint32_t[kWhole][kValueProducts][4];

 public:
  __device__ Consumer(const AttentionForwardParams& params, SharedStorage<Traits>& shared, int consumer, int thread)
      : params_(params),
        shared_(shared),
        consumer_(consumer),
        thread_(thread),
        warp_(__shfl_sync(ptx::kWholeWarp, thread / kWarp, 0)),
        reader_(shared, consumer) {}

  __device__ void run() {
    const WorkItems<Traits> items(params_);
    uint32_t q_parity = 0;
    for (int number = blockIdx.x; number < items.count; number += gridDim.x) {
      const WorkItem<Traits> item = items.decode(params_, number);
      reader_.begin_item();
      if (consumer_ >= items.active(item)) {
        reader_.next();  // the item's end: there are no entries
        continue;
      }
      ptx::wait(shared_.q_full[consumer_], q_parity);
      q_parity ^= 1;
      load_queries();
      float rO[kOutValues] = {};
      OnlineSoftmax softmax;
      attend(rO, softmax);
      // Late: a copy overwrites the tile once it is released, and by now products have used what was loaded from it.
      // The fence orders those loads before writes of the async proxy.
      ptx::fence_async_shared();
      ptx::arrive_warp(shared_.q_empty[consumer_]);
      softmax.finish();
      const int64_t first_row = (int64_t{item.row} * items.q_tiles + item.q_tile + consumer_) * kTile;
      store_tile<Traits>(params_, rO, softmax, first_row, thread_);
    }
  }

 private:
  __device__ __forceinline__ void load_queries() {
    const int lane = thread_ % kWarp;
    const int row = thread_ / kWarp * 16 + lane % 16;
#pragma unroll
    for (int product = 0; product < kScoreProducts; ++product) {
      // 128-byte swizzle: pieces of 16 bytes stand at their number xor the row's, modulo 8.
      const int piece = (product % kProductsPerBox * 2 + lane / 16) ^ row % 8;
      const T* box = shared_.sQ[consumer_] + product / kProductsPerBox * Traits::kBoxElements;
      ptx::load_matrices(rQ_[product], box + row * kBoxColumns + piece * 8);
    }
  }

  __device__ __forceinline__ void await_keys(Entry entry) {
    reader_.await_key_issue(entry);
    ptx::wait(shared_.k_full[entry.key_stage()], entry.key_parity());
  }

  __device__ __forceinline__ void await_values(Entry entry) {
    reader_.await_value_issue(entry);
    ptx::wait(shared_.v_full[entry.value_stage()], entry.value_parity());
  }

  template <int kTiles>
  __device__ __forceinline__ void await_keys(const Step& step) {
    await_keys(step.first);
    if constexpr (kTiles == 2) await_keys(step.second);
  }

  template <int kTiles>
  __device__ __forceinline__ void await_values(const Step& step) {
    await_values(step.first);
    if constexpr (kTiles == 2) await_values(step.second);
  }

  // Consumers issue one after the other: the tensor cores would otherwise serve their products interleaved, all would
  // wait twice as long, and then all would compute exponentials at a time while the tensor cores idle.
  __device__ __forceinline__ void take_turn() {
    if constexpr (Traits::kTakeTurns) {
      if (warp_ == 0) {
        while (!ptx::try_lock(shared_.turn)) __nanosleep(kTurnNanoseconds);
      }
      ptx::sync_named<kWarpgroup>(1 + consumer_);
    }
  }

  __device__ __forceinline__ void end_turn() {
    if constexpr (Traits::kTakeTurns) {
      if (warp_ == 0) ptx::unlock(shared_.turn);
    }
  }

  // S = Q K^T of one tile.
  __device__ __forceinline__ void multiply_keys(float (&rS)[kScoreValues], Entry entry) {
    const uint64_t k = ptx::matrix_descriptor(shared_.sK[entry.key_stage()]);
#pragma unroll
    for (int product = 0; product < kScoreProducts; ++product) {
      const uint32_t offset = product / kProductsPerBox * Traits::kBoxBytes + product % kProductsPerBox * 32;
      ptx::Wgmma<T, kTile>::template multiply<ptx::Major::kK>(rS, rQ_[product], ptx::advance_descriptor(k, offset),
                                                              product != 0);
    }
  }

  // O += P V of one tile.
  __device__ __forceinline__ void multiply_values(Out& rO, const uint32_t (&rP)[kValueProducts][4], Entry entry) {
    const uint64_t v = ptx::matrix_descriptor(shared_.sV[entry.value_stage()], Traits::kBoxBytes);
#pragma unroll
    for (int product = 0; product < kValueProducts; ++product) {
      ptx::Wgmma<T, Traits::kHeadDim>::template multiply<ptx::Major::kMn>(
          rO, rP[product], ptx::advance_descriptor(v, product * 2048), true);
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void issue_keys(Scores<kTiles>& rS, const Step& step) {
    ptx::fence_products();
    multiply_keys(rS[0], step.first);
    if constexpr (kTiles == 2) multiply_keys(rS[1], step.second);
    ptx::commit_products();
  }

  template <int kTiles>
  __device__ __forceinline__ void issue_values(Out& rO, const Probabilities& rP, const Step& step) {
    ptx::fence_products();
    multiply_values(rO, rP[0], step.first);
    if constexpr (kTiles == 2) multiply_values(rO, rP[1], step.second);
    ptx::commit_products();
  }

  template <int kTiles>
  __device__ __forceinline__ void hold_scores(Scores<kTiles>& rS) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) ptx::hold_registers(rS[tile]);
  }

  template <int kTiles>
  __device__ __forceinline__ void release_keys(const Step& step) {
    ptx::arrive_warp(shared_.k_empty[step.first.key_stage()]);
    if constexpr (kTiles == 2) ptx::arrive_warp(shared_.k_empty[step.second.key_stage()]);
  }

  template <int kTiles>
  __device__ __forceinline__ void release_values(const Step& step) {
    ptx::arrive_warp(shared_.v_empty[step.first.value_stage()]);
    if constexpr (kTiles == 2) ptx::arrive_warp(shared_.v_empty[step.second.value_stage()]);
  }

  // Scores to probabilities. True if O has to be corrected.
  template <int kTiles>
  __device__ __forceinline__ bool exponentiate(Scores<kTiles>& rS, OnlineSoftmax& softmax, const Step& step) {
    // Uniform branches: full tiles, the common case, pay no compare and select per element.
    if (step.first.size() < kTile) mask_columns(rS[0], step.first.size(), thread_ % kWarp);
    if constexpr (kTiles == 2) {
      if (step.second.size() < kTile) mask_columns(rS[1], step.second.size(), thread_ % kWarp);
    }
    return softmax.update(rS, params_.sm_scale_log2);
  }

  template <int kTiles>
  __device__ __forceinline__ void pack(Probabilities& rP, const Scores<kTiles>& rS) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) pack_operand<T>(rP[tile], rS[tile]);
  }

  // Probabilities of a step, and O corrected to its maxima.
  template <int kTiles>
  __device__ __forceinline__ void begin(Out& rO, Probabilities& rP, OnlineSoftmax& softmax, const Step& step) {
    Scores<kTiles> rS;
    await_keys<kTiles>(step);
    take_turn();
    issue_keys<kTiles>(rS, step);
    ptx::wait_products<0>();
    end_turn();
    hold_scores<kTiles>(rS);
    release_keys<kTiles>(step);
    if (exponentiate<kTiles>(rS, softmax, step)) softmax.correct(rO);
    pack<kTiles>(rP, rS);
  }

  template <int kTiles>
  __device__ __forceinline__ void finish(Out& rO, const Probabilities& rP, const Step& step) {
    await_values<kTiles>(step);
    issue_values<kTiles>(rO, rP, step);
    ptx::wait_products<0>();
    ptx::hold_registers(rO);
    release_values<kTiles>(step);
  }

  // finish(step) and begin(next) at a time, both whole. Returns the step after `next`, looked up in between: branches
  // keep ptxas from scheduling the wait for the products with V ahead of the exponentials that are to overlap them.
  __device__ __forceinline__ Step finish_and_begin(Out& rO, Probabilities& rP, OnlineSoftmax& softmax, const Step& step,
                                                   const Step& next) {
    Scores<kWhole> rS;
    await_keys<kWhole>(next);
    await_values<kWhole>(step);
    take_turn();
    issue_keys<kWhole>(rS, next);
    issue_values<kWhole>(rO, rP, step);
    ptx::wait_products<1>();
    end_turn();
    hold_scores<kWhole>(rS);
    release_keys<kWhole>(next);
    const bool corrected = exponentiate<kWhole>(rS, softmax, next);
    const Step following = reader_.look_ahead(step.record);
    ptx::wait_products<0>();
    ptx::hold_registers(rO);
    hold_scores<kWhole>(rS);  // packing them overwrites the operand of the products that have just ended
    release_values<kWhole>(step);
    if (corrected) softmax.correct(rO);
    pack<kWhole>(rP, rS);
    return following;
  }

  __device__ __forceinline__ void attend(Out& rO, OnlineSoftmax& softmax) {
    Probabilities rP;
    Step step = reader_.next();
    while (!step.is_end()) {
      if (kWhole == 2 && step.second.is_end()) {
        begin<1>(rO, rP, softmax, step);
        finish<1>(rO, rP, step);
        step = reader_.next();
        continue;
      }
      begin<kWhole>(rO, rP, softmax, step);
      Step following{{0}, {0}, 0};
      if constexpr (Traits::kOverlap) {
        following = reader_.look_ahead(step.record);
        while (reader_.may_overlap(step, following)) {
          const Step after = finish_and_begin(rO, rP, softmax, step, following);
          step = following;
          following = after;
        }
      }
      finish<kWhole>(rO, rP, step);
      step = following.is_end() ? reader_.next() : following;
    }
  }

  const AttentionForwardParams& params_;
  SharedStorage<Traits>& shared_;
  const int consumer_;
  const int thread_;  // of the warpgroup
  const int warp_;    // likewise, known to be the same in the whole warp
  StepReader<Traits> reader_;
  uint32_t rQ_[kScoreProducts][4];
};

}  // namespace vsa::sm90::fwd
