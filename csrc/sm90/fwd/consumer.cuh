// A consumer warpgroup: attention of one q tile over the tiles that the scheduler named for it.
//
// The order of a step is FlashAttention-3's (Shah et al., 2024): the scores of the next step are issued before the
// products of the present one with V, and the softmax of the next runs while the tensor cores do the latter. Consumers
// take turns in issuing: the softmax of one then meets the products of the other.
#pragma once

#include "../../common/softmax.cuh"
#include "../../ptx/named_barrier.cuh"
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

  using Out = float[kOutValues];
  template <int kTiles>
  using Scores = float[kTiles][kScoreValues];
  using Probabilities = uint32_t[kStepTiles][kValueProducts][4];

 public:
  __device__ Consumer(const AttentionForwardParams& params, SharedStorage<Traits>& shared, int consumer, int thread)
      : params_(params),
        shared_(shared),
        consumer_(consumer),
        thread_(thread),
        items_(params),
        reader_(shared, consumer, items_.of_this_block()) {}

  // Turn t finishes round t - 1 and begins round t, through all items.
  __device__ void run() {
    load_queries(number_);
    if (consumer_ != 0) pass_turn();
    Out rO = {};
    Probabilities rP;
    OnlineSoftmax softmax;
    Step step{{0}, {0}, false, false};
    Step next = reader_.next();
    while (!step.over) {
      take_turn();
      Step following;
      if (step.is_whole() && next.is_whole()) {
        following = turn<2, 2>(rO, rP, softmax, step, next);
      } else {
        following = uneven_turn(rO, rP, softmax, step, next);
      }
      step = next;
      next = following;
    }
  }

 private:
  // Q of this consumer in item `number`, if there is one, straight from global memory: once an item, and without a tile
  // of shared memory that would be a stage less for K and V.
  __device__ __forceinline__ void load_queries(int number) {
    if (number >= items_.count) return;
    const WorkItem<Traits> item = items_.decode(params_, number);
    if (consumer_ >= items_.active(item)) return;
    const int lane = thread_ % kWarp;
    const int64_t row = (item.q_tile + consumer_) * kTile + thread_ / kWarp * 16 + lane / 4;
    const T* rows = static_cast<const T*>(params_.q) + item.batch * params_.q_strides[0] +
                    item.head * params_.q_strides[1] + row * params_.q_strides[2] + lane % 4 * 2;
#pragma unroll
    for (int product = 0; product < kScoreProducts; ++product) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T* pair = rows + i % 2 * 8 * params_.q_strides[2] + product * 16 + i / 2 * 8;
        rQ_[product][i] = *reinterpret_cast<const uint32_t*>(pair);
      }
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void await_keys(const Step& step) {
    ptx::wait(shared_.k_full[step.first.key_stage()], step.first.key_parity());
    if constexpr (kTiles == 2) ptx::wait(shared_.k_full[step.second.key_stage()], step.second.key_parity());
  }

  template <int kTiles>
  __device__ __forceinline__ void await_values(const Step& step) {
    ptx::wait(shared_.v_full[step.first.value_stage()], step.first.value_parity());
    if constexpr (kTiles == 2) ptx::wait(shared_.v_full[step.second.value_stage()], step.second.value_parity());
  }

  __device__ __forceinline__ void take_turn() {
    ptx::sync_named<kConsumers * kWarpgroup>(kTurnOfConsumer0 + consumer_);
  }
  __device__ __forceinline__ void pass_turn() {
    ptx::arrive_named<kConsumers * kWarpgroup>(kTurnOfConsumer1 - consumer_);
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

  // A group of products for each tile, so that the first one's scores are looked at while the second is multiplied.
  template <int kTiles>
  __device__ __forceinline__ void issue_keys(Scores<kTiles>& rS, const Step& step) {
    ptx::fence_products();
    multiply_keys(rS[0], step.first);
    ptx::commit_products();
    if constexpr (kTiles == 2) {
      multiply_keys(rS[1], step.second);
      ptx::commit_products();
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void issue_values(Out& rO, const Probabilities& rP, const Step& step) {
    ptx::fence_products();
    multiply_values(rO, rP[0], step.first);
    if constexpr (kTiles == 2) multiply_values(rO, rP[1], step.second);
    ptx::commit_products();
  }

  template <int kTiles>
  __device__ __forceinline__ void release_values(const Step& step) {
    ptx::arrive_warp(shared_.v_empty[step.first.value_stage()]);
    if constexpr (kTiles == 2) ptx::arrive_warp(shared_.v_empty[step.second.value_stage()]);
  }

  // The highest scores of one tile, once at most kPending groups of products are unfinished.
  template <int kPending>
  __device__ __forceinline__ Maxima look(float (&rS)[kScoreValues], Entry entry) {
    ptx::wait_products<kPending>();
    ptx::hold_registers(rS);
    ptx::arrive_warp(shared_.k_empty[entry.key_stage()]);
    Maxima highest = thread_maxima(rS);
    // A uniform branch: full tiles, the common case, pay no compare and select per element. It stands after the maxima
    // because a branch keeps ptxas from scheduling the next wait for products ahead of them.
    if (entry.size() < kTile) {
      mask_columns(rS, entry.size(), thread_ % kWarp);
      highest = thread_maxima(rS);
    }
    return highest;
  }

  template <int kTiles>
  __device__ __forceinline__ void pack(Probabilities& rP, const Scores<kTiles>& rS) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) pack_operand<T>(rP[tile], rS[tile]);
  }

  // The end of an item: its results, and nothing accumulated.
  __device__ __forceinline__ void end_item(Out& rO, OnlineSoftmax& softmax) {
    const WorkItem<Traits> item = items_.decode(params_, number_);
    if (consumer_ < items_.active(item)) {
      softmax.finish();
      const int64_t first_row = (int64_t{item.row} * items_.q_tiles + item.q_tile + consumer_) * kTile;
      store_tile<Traits>(params_, rO, softmax, first_row, thread_);
    }
#pragma unroll
    for (int i = 0; i < kOutValues; ++i) rO[i] = 0.0f;
    number_ += gridDim.x;
  }

  // Finishes `step`, of kFinish tiles, and begins `next`, of kBegin: O += P V of the one, S and the probabilities of
  // the other. Passes the turn once products are issued. Returns the step after `next`.
  //
  // The reader advances where it does because a branch keeps ptxas from scheduling the wait for the products with V
  // ahead of the exponentials that are to overlap them.
  template <int kFinish, int kBegin>
  __device__ __forceinline__ Step turn(Out& rO, Probabilities& rP, OnlineSoftmax& softmax, const Step& step,
                                       const Step& next) {
    constexpr int kAfterKeys = kFinish > 0 ? 1 : 0;  // groups of products
    Scores<kBegin == 2 ? 2 : 1> rS;
    if constexpr (kBegin > 0) {
      await_keys<kBegin>(next);
      issue_keys<kBegin>(rS, next);
    }
    if constexpr (kFinish > 0) {
      await_values<kFinish>(step);
      issue_values<kFinish>(rO, rP, step);
    }
    if (kBegin > 0 || !next.over || consumer_ == 0) pass_turn();  // to someone who will take it
    const Step following = reader_.take();
    OnlineSoftmax begun = step.ends ? OnlineSoftmax{} : softmax;
    bool corrected = false;
    if constexpr (kBegin > 0) {
      Maxima highest = look<kAfterKeys + kBegin - 1>(rS[0], next.first);
      if constexpr (kBegin == 2) highest = highest.with(look<kAfterKeys>(rS[1], next.second));
      corrected = begun.raise(highest, params_.sm_scale_log2);
      begun.exponentiate(rS, params_.sm_scale_log2);
      ptx::hold_registers(begun.fresh);  // here, and not behind the branch, they are in the shadow of exponentials
      begun.absorb(corrected);
    }
    reader_.advance();
    // Products with the present ones are over. On their way while this item ends.
    if (next.ends) load_queries(number_ + (step.ends ? 2 : 1) * gridDim.x);
    if constexpr (kFinish > 0) {
      ptx::wait_products<0>();
      ptx::hold_registers(rO);
      // Packing them overwrites the operand of the products that have just ended.
      if constexpr (kBegin > 0) ptx::hold_registers(rS[0]);
      if constexpr (kBegin == 2) ptx::hold_registers(rS[1]);
      release_values<kFinish>(step);
    }
    if (step.ends) {
      end_item(rO, softmax);
    } else if (corrected) {
      begun.correct(rO);
    }
    softmax = begun;
    if constexpr (kBegin > 0) pack<kBegin>(rP, rS);
    return following;
  }

  // Of other numbers of tiles: at the start, where lists end, and for a consumer without a q tile.
  __device__ __forceinline__ Step uneven_turn(Out& rO, Probabilities& rP, OnlineSoftmax& softmax, const Step& step,
                                              const Step& next) {
    switch (step.tiles() * 3 + next.tiles()) {
      case 0 * 3 + 0:
        return turn<0, 0>(rO, rP, softmax, step, next);
      case 0 * 3 + 1:
        return turn<0, 1>(rO, rP, softmax, step, next);
      case 0 * 3 + 2:
        return turn<0, 2>(rO, rP, softmax, step, next);
      case 1 * 3 + 0:
        return turn<1, 0>(rO, rP, softmax, step, next);
      case 1 * 3 + 1:
        return turn<1, 1>(rO, rP, softmax, step, next);
      case 1 * 3 + 2:
        return turn<1, 2>(rO, rP, softmax, step, next);
      case 2 * 3 + 0:
        return turn<2, 0>(rO, rP, softmax, step, next);
      default:
        return turn<2, 1>(rO, rP, softmax, step, next);
    }
  }

  const AttentionForwardParams& params_;
  SharedStorage<Traits>& shared_;
  const int consumer_;
  const int thread_;  // of the warpgroup
  const WorkItems<Traits> items_;
  int number_ = blockIdx.x;  // of the item whose results are accumulated
  StepReader<Traits> reader_;
  uint32_t rQ_[kScoreProducts][4];
};

}  // namespace vsa::sm90::fwd
