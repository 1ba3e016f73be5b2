// The MmaIssuer, one thread: S = Q K^T of a round, and then O += P V of the round before; in that order, so that the
// tensor core has the former to do while P is computed.
//
//   product                  M            N         summed over    A                        B
//   S [queries, keys]        128 queries  64 keys   128 head dim   sQ, K-major              sK, K-major
//   O [queries, head dim]    128 queries  128       64 keys        P in tensor memory       sV, MN-major
//
// A stream whose tile only one of its q blocks lists leaves the lanes of the other one as they are, whatever V holds.
#pragma once

#include "../../ptx/tcgen05_mma.cuh"
#include "schedule.cuh"

namespace vsa::sm100::fwd {

// A tile in a ring.
template <typename Traits>
using Place = ptx::RingPosition<Traits::kStages>;

template <typename Traits>
class MmaIssuer {
 public:
  using T = typename Traits::T;
  static constexpr uint32_t kDepthBytes = kDepth * sizeof(T);                    // along rows of 128 bytes
  static constexpr uint32_t kDepthRowsBytes = kDepth * kBoxColumns * sizeof(T);  // down such rows
  static constexpr uint32_t kDepthColumns = kDepth / 2;                          // of P, two elements a column
  static constexpr int kDepthsOfBox = kBoxColumns / kDepth;

  __device__ MmaIssuer(const ForwardParams& params, SharedStorage<Traits>& shared)
      : params_(params), shared_(shared), tensor_memory_(shared.tensor_memory) {}

  __device__ void run() {
    RoundReader<Traits> rounds(params_, shared_);
    Round round{}, before{};  // no tiles
    bool begins_before = false;
    bool more, begins;
    do {
      more = rounds.template next<true>(round, begins);
      if (!begins) issue_scores(round, false);
      issue_values(before, begins_before);
      // An item's first products wait for its queries, which wait for the last products with those before.
      if (more && begins) issue_scores(round, true);
      before = round;
      begins_before = begins;
    } while (more);
  }

 private:
  // `begins`: the round is the first of its item.
  __device__ __forceinline__ void issue_scores(const Round& round, bool begins) {
    if (begins) {
      ptx::wait(shared_.q_full, item_parity_);
      item_parity_ ^= 1;
    }
    const Place<Traits> first = keys_;
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      if (round.words[stream] == 0) continue;
      const Place<Traits> place = stream != 0 && round.is_shared() ? first : keys_;
      if (stream == 0 || !round.is_shared()) {
        ptx::wait(shared_.k_full[place.stage], place.parity);
        keys_.advance();
      }
      const uint32_t buffer = scores_[stream].stage;
      ptx::wait(shared_.s_empty[stream][buffer], scores_[stream].parity ^ 1);
      ptx::fence_after_sync();
      multiply_keys(score_address(stream, buffer), shared_.sQ[stream], shared_.sK[place.stage]);
      ptx::commit_products(shared_.s_full[stream][buffer]);
      scores_[stream].advance();
    }
    release(shared_.k_empty, first, round);
    if (round.last == 0) return;
    if (begins && (round.words[0] | round.words[1]) == 0) {
      // A commit speaks of products alone, and of this item there are none that have waited for the copies.
      ptx::arrive(shared_.q_empty);
    } else {
      ptx::commit_products(shared_.q_empty);
    }
  }

  __device__ __forceinline__ void issue_values(const Round& round, bool begins) {
    const Place<Traits> first = values_;
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      if (begins) ptx::wait(shared_.o_empty[stream], out_parity_);
      const uint32_t word = round.words[stream];
      if (word != 0) {
        const Place<Traits> place = stream != 0 && round.is_shared() ? first : values_;
        if (stream == 0 || !round.is_shared()) {
          ptx::wait(shared_.v_full[place.stage], place.parity);
          values_.advance();
        }
        const uint32_t buffer = probabilities_[stream].stage;
        ptx::wait(shared_.p_full[stream][buffer], probabilities_[stream].parity);
        ptx::fence_after_sync();
        multiply_values(out_address(stream), score_address(stream, buffer), shared_.sV[place.stage],
                        Round::parts(word));
        ptx::commit_products(shared_.s_empty[stream][buffer]);
        probabilities_[stream].advance();
      }
      if (round.last != 0) ptx::commit_products(shared_.o_full[stream]);
    }
    if (begins) out_parity_ ^= 1;
    release(shared_.v_empty, first, round);
  }

  // The tiles of a round, which stand from `place` on.
  __device__ __forceinline__ void release(ptx::Barrier* empty, Place<Traits> place, const Round& round) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      if (round.words[stream] == 0 || (stream != 0 && round.is_shared())) continue;
      ptx::commit_products(empty[place.stage]);
      place.advance();
    }
  }

  __device__ __forceinline__ void multiply_keys(uint32_t tS, const T* queries, const T* keys) {
    constexpr uint32_t kShape = ptx::product_shape<T>(kRows, kTile, false, false);
    const uint64_t a = ptx::operand_descriptor(queries);
    const uint64_t b = ptx::operand_descriptor(keys);
#pragma unroll
    for (int k = 0; k < Traits::kHeadDim / kDepth; ++k) {
      const uint32_t box = k / kDepthsOfBox, inside = k % kDepthsOfBox * kDepthBytes;
      ptx::multiply(tS, ptx::advance(a, box * Traits::kQueryBoxBytes + inside),
                    ptx::advance(b, box * Traits::kBoxBytes + inside), kShape, k != 0);
    }
  }

  // Into an O that was cleared, so that it makes no difference which part's first tile this is.
  __device__ __forceinline__ void multiply_values(uint32_t tO, uint32_t tP, const T* values, uint32_t parts) {
    constexpr uint32_t kShape = ptx::product_shape<T>(kRows, Traits::kHeadDim, false, true);
    const uint64_t b = ptx::operand_descriptor(values, Traits::kBoxBytes);
    const uint32_t low = Traits::kParts == 1 || (parts & 1) ? 0 : ~0u;
    const uint32_t high = Traits::kParts == 1 || (parts & 2) ? 0 : ~0u;
#pragma unroll
    for (int k = 0; k < kTile / kDepth; ++k) {
      ptx::multiply_tensor(tO, tP + k * kDepthColumns, ptx::advance(b, k * kDepthRowsBytes), kShape, true,
                           ptx::LaneMask{{low, low, high, high}});
    }
  }

  __device__ __forceinline__ uint32_t out_address(int stream) const {
    return tensor_memory_ + stream * Traits::kHeadDim;
  }
  __device__ __forceinline__ uint32_t score_address(int stream, uint32_t buffer) const {
    return tensor_memory_ + Traits::kScoreColumn + (stream * Traits::kScores + buffer) * Traits::kScoreColumns;
  }

  const ForwardParams& params_;
  SharedStorage<Traits>& shared_;
  const uint32_t tensor_memory_;
  Place<Traits> keys_, values_;
  ptx::RingPosition<Traits::kScores> scores_[kStreams], probabilities_[kStreams];
  uint32_t item_parity_ = 0, out_parity_ = 0;
};

}  // namespace vsa::sm100::fwd
