// The MmaIssuer, one thread: the five products of each step, S and dP of a step ahead of the gradients of the one
// before.
//
//   product             M            N         summed over     A                      B
//   S  [queries, keys]  128 queries  64 keys   128 head dim    Q^T, MN-major          K, K-major
//   dP [queries, keys]  128 queries  64 keys   128 head dim    dO^T, MN-major         V, K-major
//   dv^T [D, keys]      128 head dim 64 keys   128 queries     dO^T, K-major          P, MN-major
//   dk^T [D, keys]      128 head dim 64 keys   128 queries     Q^T, K-major           dS, MN-major
//   dq^T [D, queries]   128 head dim 64        64 keys         K^T, tensor memory     dS, K-major; for each q block
//
// All of them are M = 128, the full rate of the tensor core, though blocks are 64: two q blocks make the 128 queries,
// and the gradients are transposed. Where a step has one q block, gradients take the first half only: four depths of dv
// and dk, one product of dq.
#pragma once

#include "items.cuh"
#include "tensor_memory.cuh"

namespace vsa::sm100::bwd {

constexpr uint32_t kDepthBytes = kDepth * kElementBytes;               // along 128-byte rows, K-major
constexpr uint32_t kDepthRowsBytes = kDepth * kBlock * kElementBytes;  // down 128-byte rows, MN-major
constexpr int kDepthsOfBlock = kBlock / kDepth;

// [queries, keys] = sum over D of A B: `plane` is Q^T or dO^T of the step, `keys` K or V.
__device__ __forceinline__ void multiply_scores(uint32_t tD, const uint8_t* plane, const uint8_t* keys) {
  constexpr uint32_t kShape = ptx::product_shape(kQueries, kBlock, true, false);
  const uint64_t a = ptx::operand_descriptor(plane, kPlaneBytes);
  const uint64_t b = ptx::operand_descriptor(keys, 0);
#pragma unroll
  for (int k = 0; k < kHeadDim / kDepth; ++k) {
    const uint32_t of_keys = k / kDepthsOfBlock * kBoxBytes + k % kDepthsOfBlock * kDepthBytes;
    ptx::multiply(tD, ptx::advance(a, k * kDepthRowsBytes), ptx::advance(b, of_keys), kShape, k > 0);
  }
}

// [D, keys] += sum over the queries of `blocks` q blocks of A B: `plane` as above, `tile` P or dS.
__device__ __forceinline__ void multiply_gradients(uint32_t tD, const uint8_t* plane, const uint8_t* tile, int blocks,
                                                   bool accumulate) {
  constexpr uint32_t kShape = ptx::product_shape(kHeadDim, kBlock, false, true);
  const uint64_t a = ptx::operand_descriptor(plane, 0);
  const uint64_t b = ptx::operand_descriptor(tile, 0);
  for (int half = 0; half < blocks; ++half) {
#pragma unroll
    for (int k = 0; k < kDepthsOfBlock; ++k) {
      ptx::multiply(tD, ptx::advance(a, half * kPlaneBytes + k * kDepthBytes),
                    ptx::advance(b, (half * kDepthsOfBlock + k) * kDepthRowsBytes), kShape,
                    accumulate || half > 0 || k > 0);
    }
  }
}

// [D, queries] of one q block = sum over keys of A B: K^T in tensor memory, and the rows of dS of the q block.
__device__ __forceinline__ void multiply_dq(uint32_t tD, uint32_t tK, const uint8_t* tile) {
  constexpr uint32_t kShape = ptx::product_shape(kHeadDim, kBlock, false, false);
  constexpr uint32_t kDepthColumns = kDepth / 2;
  const uint64_t b = ptx::operand_descriptor(tile, 0);
#pragma unroll
  for (int k = 0; k < kDepthsOfBlock; ++k) {
    ptx::multiply_tensor(tD, tK + k * kDepthColumns, ptx::advance(b, k * kDepthBytes), kShape, k > 0);
  }
}

// Where a step stands in its item.
struct Step {
  int blocks;
  bool first, last;
};

// The steps of all items, one after the other.
template <typename Traits>
class StepWalk {
 public:
  enum class Found { kStep, kEmptyItem, kEnd };

  __device__ __forceinline__ explicit StepWalk(typename Traits::Shared& shared) : items_(shared) {}

  // An item without steps is told: who looks ahead must not wait for the item after it. The Scheduler has no place for
  // that one before the Epilogue goes on, and the Epilogue waits for the gradients of the step before.
  __device__ __forceinline__ Found next(Step& step) {
    if (at_ == item_.steps()) {
      if (!items_.next(item_)) return Found::kEnd;
      at_ = 0;
      if (item_.count == 0) return Found::kEmptyItem;
    }
    step = {item_.blocks(at_), at_ == 0, at_ + 1 == item_.steps()};
    ++at_;
    return Found::kStep;
  }

 private:
  ItemReader<Traits, false> items_;
  Item item_{};
  int at_ = 0;
};

// S has its own place in the rings: it is a step, and may be an item, ahead of the rest.
template <typename Traits>
class MmaIssuer {
 public:
  using Shared = typename Traits::Shared;
  __device__ __forceinline__ MmaIssuer(const BackwardParams& params, Shared& shared)
      : shared_(shared), tensor_memory_(shared.tensor_memory), with_dq_(params.with_dq) {}

  // What it overwrites was read before P of the step before was there, which dv waited for.
  __device__ __forceinline__ void scores(const Step& step) {
    if (step.first) ptx::wait(shared_.full_k, key_parity_);
    ptx::wait(shared_.full_q[ahead_.stage], ahead_.parity);
    multiply_scores(tensor_memory_ + Traits::kSColumn, shared_.sQ[ahead_.stage][0], shared_.sK);
    ptx::commit_products(shared_.full_s);
    if (step.last) {
      ptx::commit_products(shared_.empty_k);
      key_parity_ ^= 1;
    }
    ahead_.advance();
  }

  // What dP overwrites was read before dS of the step before was there, which dk waited for.
  __device__ __forceinline__ void dp_and_dv(const Step& step) {
    if (step.first) ptx::wait(shared_.full_v, item_parity_);
    ptx::wait(shared_.full_dout[at_.stage], at_.parity);
    multiply_scores(tensor_memory_ + Traits::kDpColumn, shared_.sDout[at_.stage][0], shared_.sV);
    ptx::commit_products(shared_.full_dp);
    if (step.last) ptx::commit_products(shared_.empty_v);

    if (step.first) ptx::wait(shared_.empty_accumulators, item_parity_ ^ 1);
    await_tile(shared_.full_p);
    multiply_gradients(tensor_memory_ + Traits::kDvColumn, shared_.sDout[at_.stage][0], shared_.sP, step.blocks,
                       !step.first);
    ptx::commit_products(shared_.empty_dout[at_.stage]);
  }

  __device__ __forceinline__ void dk_and_dq(const Step& step) {
    await_tile(shared_.full_ds);
    multiply_gradients(tensor_memory_ + Traits::kDkColumn, shared_.sQ[at_.stage][0], shared_.sDs, step.blocks,
                       !step.first);
    ptx::commit_products(shared_.empty_q[at_.stage]);
    if (step.last) ptx::commit_products(shared_.full_accumulators);

    if (step.first) ptx::wait(shared_.full_key_operand, item_parity_);
    if (with_dq_) {
      for (int half = 0; half < step.blocks; ++half, dq_.advance()) {
        ptx::wait(shared_.empty_dq[dq_.stage], dq_.parity ^ 1);
        ptx::fence_after_sync();
        multiply_dq(tensor_memory_ + Traits::kDqColumn + dq_.stage * kBlock, tensor_memory_ + Traits::kKeyColumn,
                    shared_.sDs + half * (kTileBytes / kGroup));
        ptx::commit_products(shared_.full_dq[dq_.stage]);
      }
    }
    if (step.last) {
      ptx::commit_products(shared_.empty_key_operand);
      item_parity_ ^= 1;
    }
    step_parity_ ^= 1;
    at_.advance();
  }

 private:
  // Compute wrote P or dS by the generic proxy; its warps arrive, and this thread fences for all of them.
  __device__ __forceinline__ void await_tile(ptx::Barrier& full) {
    ptx::wait(full, step_parity_);
    ptx::fence_async_shared();
    ptx::fence_after_sync();
  }

  Shared& shared_;
  const uint32_t tensor_memory_;
  const bool with_dq_;
  ptx::RingPosition<Traits::kStages> ahead_, at_;
  ptx::RingPosition<Traits::kDqSlots> dq_;
  uint32_t key_parity_ = 0;   // of K in shared memory
  uint32_t item_parity_ = 0;  // of V, K^T, dk and dv
  uint32_t step_parity_ = 0;  // of P and of dS
};

template <typename Traits>
__device__ void issue(const BackwardParams& params, typename Traits::Shared& shared) {
  MmaIssuer<Traits> issuer(params, shared);
  StepWalk<Traits> walk(shared);
  using Found = typename StepWalk<Traits>::Found;
  Step ahead{}, at{};
  bool pending = false;
  for (Found found = Found::kEmptyItem; found != Found::kEnd;) {
    if (pending) issuer.dp_and_dv(at);
    found = walk.next(ahead);
    if (found == Found::kStep) issuer.scores(ahead);
    if (pending) issuer.dk_and_dq(at);
    pending = found == Found::kStep;
    at = ahead;
  }
}

}  // namespace vsa::sm100::bwd
