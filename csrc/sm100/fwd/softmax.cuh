// Softmax, a warpgroup for each stream: S to P in tensor memory, and what O has to be multiplied by.
//
// A thread has one query, so maxima and sums need no other thread. The subtracted maximum may lag behind the true one
// (kLag): most steps then leave O alone, and those that do not correct it here, between two products.
#pragma once

#include "../../common/fragments.cuh"
#include "../../ptx/tcgen05_ld.cuh"
#include "schedule.cuh"

namespace vsa::sm100::fwd {

// The state of a row.
struct RowSoftmax {
  // The maximum may lag by this power of two: probabilities stay below 256, far from the limits of fp16 and bf16.
  static constexpr float kLag = 8.0f;

  float peak = -INFINITY;  // subtracted maximum of the scores, unscaled
  float sum = 0.0f;

  __device__ __forceinline__ bool is_behind(float highest, float scale_log2) const {
    return (highest - peak) * scale_log2 > kLag;
  }
  // What earlier results are to be multiplied by. A row without a finite score has none, and -inf + inf is NaN.
  __device__ __forceinline__ float raise(float highest, float scale_log2) {
    const float higher = fmaxf(peak, highest);
    const float correction = higher == -INFINITY ? 1.0f : exp2_approximate((peak - higher) * scale_log2);
    peak = higher;
    sum *= correction;
    return correction;
  }
  template <int kValues>
  __device__ __forceinline__ void exponentiate(float (&rS)[kValues], float scale_log2) {
    const float shift = peak == -INFINITY ? 0.0f : peak * scale_log2;
    constexpr int kChains = 4;  // of additions that wait for each other
    float partial[kChains] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      rS[i] = exp2_approximate(fmaf(rS[i], scale_log2, -shift));
      partial[i % kChains] += rS[i];
    }
    sum += (partial[0] + partial[1]) + (partial[2] + partial[3]);
  }
};

template <int kValues>
__device__ __forceinline__ float highest_of(const float (&values)[kValues]) {
  constexpr int kChains = 4;
  float chains[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) chains[i] = values[i];
#pragma unroll
  for (int i = kChains; i < kValues; ++i) chains[i % kChains] = fmaxf(chains[i % kChains], values[i]);
  return fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
}

template <typename Traits>
class Softmax {
  static constexpr int kLoad = 32;  // columns of one load
  using Scores = float[kTile];

 public:
  __device__ Softmax(const ForwardParams& params, SharedStorage<Traits>& shared, int stream, int thread)
      : params_(params),
        shared_(shared),
        stream_(stream),
        thread_(thread),
        part_(thread / Traits::kBlockSize),
        lanes_(ptx::tensor_address(shared.tensor_memory, thread / kWarp * kWarp, 0)) {}

  __device__ void run() {
    RoundReader<Traits> rounds(params_, shared_);
    RowSoftmax row;
    bool has_results = false;  // this part has had a tile of the item
    Round round;
    bool begins;
    while (rounds.template next<false>(round, begins)) {
      if (begins) {
        row = {};
        has_results = false;
      }
      const uint32_t word = round.word(stream_);
      if (word != 0) step(row, has_results, word);
      if (round.last != 0) hand_over(row);
    }
  }

 private:
  // The end of an item.
  __device__ __forceinline__ void hand_over(const RowSoftmax& row) {
    // Sums of the item before have been read.
    ptx::wait(shared_.o_empty[stream_], item_parity_);
    item_parity_ ^= 1;
    shared_.sInverse[stream_][thread_] = row.sum == 0.0f ? 0.0f : 1.0f / row.sum;
    shared_.sLse[stream_][thread_] =
        row.sum == 0.0f ? -INFINITY : fmaf(row.peak, params_.sm_scale_log2, log2_approximate(row.sum));
    ptx::arrive_warp(shared_.sums_full[stream_]);
  }

  // The warps of a part that does not list the tile wait and arrive as the others do, so that no one is a phase ahead.
  __device__ __forceinline__ void step(RowSoftmax& row, bool& has_results, uint32_t word) {
    const uint32_t buffer = ring_.stage;
    const uint32_t tS = lanes_ + Traits::kScoreColumn + (stream_ * Traits::kScores + buffer) * Traits::kScoreColumns;
    ptx::wait(shared_.s_full[stream_][buffer], ring_.parity);
    if (Round::parts(word) >> part_ & 1) {
      ptx::fence_after_sync();
      Scores rS;
      load_scores(rS, tS);
      if (Round::size(word) < kTile) mask(rS, Round::size(word));
      const float highest = highest_of(rS);
      if (__any_sync(ptx::kWholeWarp, row.is_behind(highest, params_.sm_scale_log2))) {
        const float correction = row.raise(highest, params_.sm_scale_log2);
        if (has_results) correct(correction);
      }
      has_results = true;
      row.exponentiate(rS, params_.sm_scale_log2);
      store_probabilities(tS, rS);
      ptx::fence_before_sync();
    }
    ptx::arrive_warp(shared_.p_full[stream_][buffer]);
    ring_.advance();
  }

  __device__ __forceinline__ static void load_scores(Scores& rS, uint32_t tS) {
    float (&low)[kLoad] = reinterpret_cast<float (&)[kLoad]>(rS[0]);
    float (&high)[kLoad] = reinterpret_cast<float (&)[kLoad]>(rS[kLoad]);
    ptx::load_columns(low, tS);
    ptx::load_columns(high, tS + kLoad);
    ptx::await_loads(low);
    ptx::hold_loaded(high);
  }

  // Keys from `size` on get -inf, whatever K was there.
  __device__ __forceinline__ static void mask(Scores& rS, int size) {
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (i >= size) rS[i] = -INFINITY;
    }
  }

  // P over the first columns of its S, which this warp has read.
  __device__ __forceinline__ static void store_probabilities(uint32_t tP, const Scores& rS) {
    uint32_t rP[kTile / 2];
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) rP[i] = pack_pair<typename Traits::T>(rS[2 * i], rS[2 * i + 1]);
    ptx::store_columns(tP, rP);
    ptx::wait_stores();
  }

  // Multiplies O, once the products of the step before are in it.
  __device__ __forceinline__ void correct(float correction) {
    const uint32_t before = ring_.stage ^ 1;
    ptx::wait(shared_.s_empty[stream_][before], ring_.stage == 0 ? ring_.parity ^ 1 : ring_.parity);
    ptx::fence_after_sync();
    const uint32_t tO = lanes_ + stream_ * Traits::kHeadDim;
#pragma unroll 1
    for (int column = 0; column < Traits::kHeadDim; column += kLoad) {
      float rO[kLoad];
      ptx::load_columns(rO, tO + column);
      ptx::await_loads(rO);
#pragma unroll
      for (int i = 0; i < kLoad; ++i) rO[i] *= correction;
      ptx::store_columns(tO + column, rO);  // waited for with P
    }
  }

  const ForwardParams& params_;
  SharedStorage<Traits>& shared_;
  const int stream_;
  const int thread_;  // of the warpgroup, and row
  const int part_;
  const uint32_t lanes_;  // tensor memory of this warp
  ptx::RingPosition<Traits::kScores> ring_;
  uint32_t item_parity_ = 0;
};

}  // namespace vsa::sm100::fwd
