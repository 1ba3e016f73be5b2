// The dq pass: dq of a q block by one block of threads, over its kv_indices in their order, without reductions: bitwise
// the same on every run. Emulated, not yet run on silicon. With it the main kernel runs without dq (params.with_dq).
//
// Keys are the rows here, two kv blocks a step (128 lanes of tensor memory), and the 64 queries are columns:
//
//   sQ, sDout [128 head dim, 64 queries]     sK, sV [2 boxes][128 keys, 64 columns]     sDs [128 keys, 64 queries]
//   tensor memory: S^T [keys, queries] | dP^T [keys, queries] | dq^T [head dim, queries], 64 columns each, of 256
//
//   Loader     Q^T, dO^T -> full_planes; K -> full_k; V -> full_v                     waits empty_k, empty_v
//   MmaIssuer  S^T, dP^T -> full_scores, empty_v; dq^T -> empty_k, or full_dq         waits full_*
//   Compute    dS^T, zeroes rows of K that are no keys -> full_ds                     waits full_scores; full_dq
//
// One step at a time: what it would take to overlap steps is what two blocks on a multiprocessor have, each half of its
// shared memory, tensor memory and threads. Compute may write dS^T as soon as it has the scores of a step: they follow
// the products that read the dS^T before.
#pragma once

#include "compute.cuh"
#include "loader.cuh"
#include "mma_issuer.cuh"

namespace vsa::sm100::bwd {

struct DqTraits {
  static constexpr int kComputeWarp = 0, kLoaderWarp = kWarpsOfGroup, kIssuerWarp = kWarpsOfGroup + 1;
  static constexpr int kThreads = kWarpgroup + 2 * kWarp;
  static constexpr int kBlocksOfMultiprocessor = 2;
  static constexpr int kKeys = 2 * kBlock;  // of a step: a lane of tensor memory each
  static constexpr int kQueries = kBlock;

  static constexpr uint32_t kDpColumn = kQueries, kDqColumn = 2 * kQueries;
  static constexpr uint32_t kTensorColumns = 256;
  static_assert(kDqColumn + kQueries <= kTensorColumns && kBlocksOfMultiprocessor * kTensorColumns <= 512,
                "the second block would wait for columns until the first has ended");

  static constexpr int kBoxBytes = kKeys * kBoxColumns * kElementBytes;
  static constexpr int kBoxes = kHeadDim / kBoxColumns;

  struct Shared {
    alignas(kSwizzleBytes) uint8_t sQ[kPlaneBytes];
    uint8_t sDout[kPlaneBytes];
    uint8_t sK[kBoxes][kBoxBytes];
    uint8_t sV[kBoxes][kBoxBytes];
    uint8_t sDs[kKeys * kQueries * kElementBytes];
    alignas(16) float sLse[kQueries], sDelta[kQueries];
    ptx::Barrier full_planes, full_k, empty_k, full_v, empty_v, full_scores, full_ds, full_dq;
    uint32_t tensor_memory;
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static constexpr int kMultiprocessorSharedBytes = 228 * 1024, kSystemSharedBytes = 1024;
  static_assert(kBlocksOfMultiprocessor * (kSharedBytes + kSystemSharedBytes) <= kMultiprocessorSharedBytes,
                "two blocks would not fit on a multiprocessor");
};

// The list of a q block.
struct DqItem {
  int row, q_block, count;
  const int* list;

  __device__ __forceinline__ int steps() const { return (count + 1) / 2; }
  // The second half of an odd list's last step repeats its block, as one without keys.
  __device__ __forceinline__ bool exists(int step, int half) const { return 2 * step + half < count; }
  __device__ __forceinline__ int block(int step, int half) const {
    return __ldg(list + min(2 * step + half, count - 1));
  }
};

__device__ __forceinline__ DqItem dq_item(const BackwardParams& params, int number) {
  DqItem item;
  item.row = number / params.Nq;
  item.q_block = number - item.row * params.Nq;
  item.count = __ldg(params.kv_num_blocks + number);
  item.list = params.kv_indices + int64_t{number} * params.M;
  return item;
}

__device__ __forceinline__ void load_key_pair(uint8_t (&target)[DqTraits::kBoxes][DqTraits::kBoxBytes],
                                              const CUtensorMap& map, ptx::Barrier& barrier,
                                              const BackwardParams& params, const DqItem& item, int step) {
  const int batch = item.row / params.H;
  ptx::arrive_expect_bytes(barrier, sizeof(target));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = item.block(step, half) * kBlock;
#pragma unroll
    for (int box = 0; box < DqTraits::kBoxes; ++box) {
      ptx::load_box(target[box] + half * kBoxBytes, map, barrier, box * kBoxColumns, token, item.row - batch * params.H,
                    batch);
    }
  }
}

__device__ inline void load_dq_operands(const BackwardParams& params, DqTraits::Shared& shared, const DqItem& item) {
  const int batch = item.row / params.H;
  const int token = (batch * params.Nq + item.q_block) * kBlock;
  const int row = (item.row - batch * params.H) * kHeadDim;
  ptx::arrive_expect_bytes(shared.full_planes, 2 * kPlaneBytes);
  ptx::load_plane(shared.sQ, params.q_transposed, shared.full_planes, token, row);
  ptx::load_plane(shared.sDout, params.dout_transposed, shared.full_planes, token, row);
  // V first: it is free while Compute still works on the step, K only when dq has read it.
  uint32_t parity = 0;
  for (int step = 0; step < item.steps(); ++step, parity ^= 1) {
    ptx::wait(shared.empty_v, parity ^ 1);
    load_key_pair(shared.sV, params.v, shared.full_v, params, item, step);
    ptx::wait(shared.empty_k, parity ^ 1);
    load_key_pair(shared.sK, params.k, shared.full_k, params, item, step);
  }
}

// [keys, queries] = sum over D of A B: K or V, and Q^T or dO^T.
__device__ __forceinline__ void multiply_key_scores(uint32_t tD, const uint8_t* keys, const uint8_t* plane) {
  constexpr uint32_t kShape = ptx::product_shape(DqTraits::kKeys, DqTraits::kQueries, false, true);
  const uint64_t a = ptx::operand_descriptor(keys, 0);
  const uint64_t b = ptx::operand_descriptor(plane, 0);
#pragma unroll
  for (int k = 0; k < kHeadDim / kDepth; ++k) {
    const uint32_t of_keys = k / kDepthsOfBlock * DqTraits::kBoxBytes + k % kDepthsOfBlock * kDepthBytes;
    ptx::multiply(tD, ptx::advance(a, of_keys), ptx::advance(b, k * kDepthRowsBytes), kShape, k > 0);
  }
}

// [D, queries] += sum over the keys of `blocks` kv blocks of A B: K and dS^T.
__device__ __forceinline__ void multiply_key_dq(uint32_t tD, const uint8_t* keys, const uint8_t* tile, int blocks,
                                                bool accumulate) {
  constexpr uint32_t kShape = ptx::product_shape(kHeadDim, DqTraits::kQueries, true, true);
  const uint64_t a = ptx::operand_descriptor(keys, DqTraits::kBoxBytes);
  const uint64_t b = ptx::operand_descriptor(tile, 0);
  for (int k = 0; k < blocks * kDepthsOfBlock; ++k) {
    ptx::multiply(tD, ptx::advance(a, k * kDepthRowsBytes), ptx::advance(b, k * kDepthRowsBytes), kShape,
                  accumulate || k > 0);
  }
}

__device__ inline void issue_dq(DqTraits::Shared& shared, const DqItem& item) {
  const uint32_t tS = shared.tensor_memory;
  ptx::wait(shared.full_planes, 0);
  uint32_t parity = 0;
  for (int step = 0; step < item.steps(); ++step, parity ^= 1) {
    ptx::wait(shared.full_k, parity);
    multiply_key_scores(tS, shared.sK[0], shared.sQ);
    ptx::wait(shared.full_v, parity);
    multiply_key_scores(tS + DqTraits::kDpColumn, shared.sV[0], shared.sDout);
    ptx::commit_products(shared.full_scores);
    ptx::commit_products(shared.empty_v);
    ptx::wait(shared.full_ds, parity);
    ptx::fence_async_shared();
    ptx::fence_after_sync();
    multiply_key_dq(tS + DqTraits::kDqColumn, shared.sK[0], shared.sDs, item.exists(step, 1) ? 2 : 1, step > 0);
    ptx::commit_products(step + 1 == item.steps() ? shared.full_dq : shared.empty_k);
  }
}

// dS^T of one key and half of the queries, from tensor memory to its row of the tile. What is no key has zeros,
// selected, not multiplied: its scores may be NaN.
__device__ __forceinline__ void differentiate_key(DqTraits::Shared& shared, float scale_log2, bool is_key, int first,
                                                  uint32_t tS, int key) {
  constexpr int kHalf = DqTraits::kQueries / 2;
  float rS[kHalf], rDp[kHalf];
  ptx::load_columns(rS, tS + first);
  ptx::load_columns(rDp, tS + DqTraits::kDpColumn + first);
  ptx::await_loads(rDp);
  ptx::hold_loaded(rS);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float p = exp2_approximate(fmaf(rS[i], scale_log2, -shared.sLse[first + i]));
    rS[i] = is_key ? p * (rDp[i] - shared.sDelta[first + i]) : 0.0f;
  }
  store_row(shared.sDs, rS, key, first);
}

__device__ inline void compute_dq(const BackwardParams& params, DqTraits::Shared& shared, const DqItem& item,
                                  int thread) {
  const int warp = thread / kWarp;
  const uint32_t tS = ptx::tensor_address(shared.tensor_memory, warp * kWarp, 0);
  const int half = thread / kBlock;
  uint32_t parity = 0;
  for (int step = 0; step < item.steps(); ++step, parity ^= 1) {
    const int size = item.exists(step, half) ? __ldg(params.kv_block_sizes + item.block(step, half)) : 0;
    const bool is_key = thread % kBlock < size;
    ptx::wait(shared.full_scores, parity);
    ptx::fence_after_sync();
    __syncwarp();
    differentiate_key(shared, params.sm_scale_log2, is_key, 0, tS, thread);
    differentiate_key(shared, params.sm_scale_log2, is_key, DqTraits::kQueries / 2, tS, thread);
    ptx::fence_before_sync();
    if (!is_key) {
      // 0 * NaN is NaN in dq = dS K. A whole row: the swizzle stays inside it.
      constexpr int kVectors = kBoxColumns * kElementBytes / sizeof(uint4);
#pragma unroll
      for (int i = 0; i < DqTraits::kBoxes * kVectors; ++i) {
        reinterpret_cast<uint4*>(shared.sK[i / kVectors])[thread * kVectors + i % kVectors] = uint4{0, 0, 0, 0};
      }
    }
    ptx::arrive_warp(shared.full_ds);
  }
  ptx::wait(shared.full_dq, 0);
  ptx::fence_after_sync();
  __syncwarp();
}

// A q block of the accumulator, in its order (drain.cuh): dq, or zeros where the list is empty.
__device__ inline void write_dq(const BackwardParams& params, const DqTraits::Shared& shared, int number, bool empty,
                                int thread) {
  constexpr int kColumns = 32;  // of a load
  const int warp = thread / kWarp;
  float4* target =
      reinterpret_cast<float4*>(static_cast<float*>(params.dq_accum) + int64_t{number} * (kBlock * kHeadDim)) +
      warp * (kBlock / 4 * kWarp) + thread % kWarp;
  for (int first = 0; first < kBlock; first += kColumns) {
    float rDq[kColumns] = {};
    if (!empty) read_columns(rDq, shared.tensor_memory + DqTraits::kDqColumn + first, warp);
#pragma unroll
    for (int c = 0; c < kColumns / 4; ++c) {
      target[(first / 4 + c) * kWarp] = float4{rDq[4 * c], rDq[4 * c + 1], rDq[4 * c + 2], rDq[4 * c + 3]};
    }
  }
}

__device__ inline void init_dq_barriers(DqTraits::Shared& shared) {
  for (ptx::Barrier* barrier : {&shared.full_planes, &shared.full_k, &shared.empty_k, &shared.full_v, &shared.empty_v,
                                &shared.full_scores, &shared.full_dq}) {
    ptx::init_barrier(*barrier, 1);
  }
  ptx::init_barrier(shared.full_ds, kWarpsOfGroup);
  ptx::fence_barrier_init();
}

// A template only so that it may stand in a header.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksOfMultiprocessor)
    dq_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(kSwizzleBytes) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int warp = __shfl_sync(ptx::kWholeWarp, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int thread = threadIdx.x;
  const DqItem item = dq_item(params, blockIdx.x);
  if (item.count == 0) {
    if (warp < kWarpsOfGroup) write_dq(params, shared, blockIdx.x, true, thread);
    return;
  }

  if (warp == Traits::kLoaderWarp && thread % kWarp == 0) init_dq_barriers(shared);
  if (warp == Traits::kIssuerWarp) {
    ptx::allocate_tensor_memory<Traits::kTensorColumns>(shared.tensor_memory);
    ptx::relinquish_tensor_memory();
  }
  if (warp < kWarpsOfGroup) {
    const int64_t query = int64_t{blockIdx.x} * kBlock + thread % kBlock;
    if (thread < kBlock) shared.sLse[thread] = params.lse_log2[query];
    if (thread >= kBlock) shared.sDelta[thread - kBlock] = params.delta[query];
  }
  ptx::fence_before_sync();
  __syncthreads();
  ptx::fence_after_sync();

  if (warp < kWarpsOfGroup) {
    compute_dq(params, shared, item, thread);
    write_dq(params, shared, blockIdx.x, false, thread);
  } else {
    if (ptx::elect_one()) {
      if (warp == Traits::kLoaderWarp) load_dq_operands(params, shared, item);
      if (warp == Traits::kIssuerWarp) issue_dq(shared, item);
    }
    __syncwarp();
  }

  ptx::fence_before_sync();
  __syncthreads();
  ptx::fence_after_sync();
  if (warp == Traits::kIssuerWarp) {
    ptx::free_tensor_memory<Traits::kTensorColumns>(shared.tensor_memory);
  }
}

}  // namespace vsa::sm100::bwd
