// A Consumer of the fused kernel: dk and dv of one kv block.
//
//   rS   [64 keys, 64 queries]  K Q^T, then P^T = exp2(S^T sm_scale_log2 - lse_log2)
//   rDp  [64 keys, 64 queries]  V dO^T, then dS^T = P^T (dP^T - delta)
//   dv += P^T dO, dk += dS^T Q with P^T and dS^T as register operands; dS^T also goes to shared memory, for the
//   Reducer.
//
// Keys are rows, so that nothing of P and dS that dk and dv need has to pass through shared memory.
#pragma once

#include "../../ptx/matrix.cuh"
#include "../../ptx/named_barrier.cuh"
#include "dkdv_item.cuh"
#include "fragments.cuh"
#include "products.cuh"

namespace vsa::sm90::bwd {

// What a thread needs of a vector over the 64 queries: those of its columns.
__device__ __forceinline__ void load_columns(float2 (&columns)[kBlock / 8], const float* vector, int thread) {
#pragma unroll
  for (int j = 0; j < kBlock / 8; ++j) columns[j] = *reinterpret_cast<const float2*>(vector + 8 * j + thread % 4 * 2);
}

// P^T, packed as A operands, from scores of [keys, queries] fragments; lse of the queries.
template <typename T>
__device__ __forceinline__ void exponentiate(uint32_t (&rP)[4][4], const float (&rS)[32],
                                             const float2 (&lse)[kBlock / 8], float sm_scale_log2) {
#pragma unroll
  for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 4 * j + 2 * h;
      rP[j / 2][2 * (j % 2) + h] = pack_pair<T>(exp2_approximate(fmaf(rS[at], sm_scale_log2, -lse[j].x)),
                                                exp2_approximate(fmaf(rS[at + 1], sm_scale_log2, -lse[j].y)));
    }
  }
}

// dS^T = P^T (dP^T - delta), packed alike. P as it was rounded for dv: the registers of an
// unrounded P are those that dP needs.
template <typename T>
__device__ __forceinline__ void differentiate(uint32_t (&rDs)[4][4], const uint32_t (&rP)[4][4], const float (&rDp)[32],
                                              const float2 (&delta)[kBlock / 8]) {
#pragma unroll
  for (int j = 0; j < kBlock / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 4 * j + 2 * h;
      const float2 p = unpack_pair<T>(rP[j / 2][2 * (j % 2) + h]);
      rDs[j / 2][2 * (j % 2) + h] = pack_pair<T>(p.x * (rDp[at] - delta[j].x), p.y * (rDp[at + 1] - delta[j].y));
    }
  }
}

// A copy that the compiler does not see through; the assembler may.
__device__ __forceinline__ void copy_registers(uint32_t (&to)[4][4], const uint32_t (&from)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(to[i / 4][i % 4]) : "r"(from[i / 4][i % 4]));
}

// Zeros in rows from `size` on. Selected, not multiplied: rows that are no keys may hold NaN.
__device__ __forceinline__ void clear_rows(uint32_t (&fragments)[4][4], int size, int thread) {
  const int first_row = thread / kWarp * 16 + thread % kWarp / 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (first_row + i % 2 * 8 >= size) fragments[i / 4][i % 4] = 0;
  }
}

// dS^T as a tile of 64 queries a row, 128-byte swizzle.
__device__ __forceinline__ void store_ds(uint8_t* tile, const uint32_t (&rDs)[4][4], int thread) {
  const int lane = thread % kWarp;
  // Of a group of 16 queries, matrix 2 c + h holds rows 8 h and up, queries 8 c and up.
  const int row = thread / kWarp * 16 + lane / 8 % 2 * 8 + lane % 8;
  uint8_t* start = tile + row * kBoxColumns * kElementBytes;
#pragma unroll
  for (int k = 0; k < kBlock / kDepth; ++k) {
    const int chunk = (2 * k + lane / 16) ^ (lane % 8);
    ptx::store_matrices(start + chunk * 16, rDs[k]);
  }
}

template <typename Traits>
__device__ void consume(const AttentionBackwardParams& params, typename Traits::Shared& shared, int consumer,
                        int thread) {
  using T = typename Traits::T;
  constexpr int kHeadDim = Traits::kHeadDim;
  const int size = consumer < shared.item.blocks ? params.kv_block_sizes[shared.item.kv.block[consumer]] : 0;
  const uint8_t* sK = shared.sK[consumer];
  const uint8_t* sV = shared.sV[consumer];

  float rDk[kHeadDim / 2] = {};
  float rDv[kHeadDim / 2] = {};

  ptx::wait(shared.full_k, 0);
  if (size < kBlock) {
    if (consumer < shared.item.blocks) {
      clear_tile_rows<Traits::kBoxes>(shared.sK[consumer], size, thread);
      // Else products of the Reducer alone read it, behind the Publisher's fence.
      if constexpr (!Traits::kKeysInRegisters) ptx::fence_async_shared();
    }
    __syncwarp();
    ptx::sync_named<kWarpgroup>(kConsumer0 + consumer);
  }
  ptx::wait(shared.full_v, 0);
  uint32_t rK[kHeadDim / kDepth][4], rV[kHeadDim / kDepth][4];
  if (Traits::kKeysInRegisters && consumer < shared.item.blocks) {
    __syncwarp();
    load_fragments<kHeadDim>(rK, sK, thread);
    load_fragments<kHeadDim>(rV, sV, thread);
  }
  // Of the item's keys or values with a row block.
  const auto multiply_keys = [&](float (&d)[32], const uint32_t (&fragments)[kHeadDim / kDepth][4], const uint8_t* a,
                                 const uint8_t* b) {
    if constexpr (Traits::kKeysInRegisters) {
      multiply_rows<T, kHeadDim>(d, fragments, b);
    } else {
      multiply_rows<T, kHeadDim>(d, a, b);
    }
  };

  ptx::RingPosition<Traits::kStages> ring;
  uint32_t turn = 0;  // own steps: the slot and its parity in one register
  for (;; ring.advance()) {
    ptx::wait(shared.full[ring.stage], ring.parity);
    const int wanted = shared.sWanted[ring.stage];
    if (wanted == 0) break;
    if (wanted >> consumer & 1) {
      uint32_t rP[4][4], rDs[4][4];
      __syncwarp();  // lanes left the waits one by one
      {
        float rS[32];
        ptx::fence_products();
        multiply_keys(rS, rK, sK, shared.sQ[ring.stage]);
        ptx::commit_products();
        ptx::wait_products<0>();
        ptx::hold_registers(rS);
        float2 lse[kBlock / 8];
        load_columns(lse, shared.sLse[ring.stage], thread);
        exponentiate<T>(rP, rS, lse, params.sm_scale_log2);
      }
      if (size < kBlock) clear_rows(rP, size, thread);
      {
        float rDp[32];
        // Registers of an operand may not even be read before the wait for the product (PTX ISA 9.7.15.7.1).
        uint32_t rProbabilities[4][4];
        copy_registers(rProbabilities, rP);
        ptx::fence_products();
        multiply_keys(rDp, rV, sV, shared.sDout[ring.stage]);
        ptx::commit_products();
        accumulate_rows<T, kHeadDim>(rDv, rP, shared.sDout[ring.stage]);
        ptx::commit_products();
        ptx::wait_products<1>();
        ptx::hold_registers(rDp);
        float2 delta[kBlock / 8];
        load_columns(delta, shared.sDelta[ring.stage], thread);
        differentiate<T>(rDs, rProbabilities, rDp, delta);
      }
      if (size < kBlock) clear_rows(rDs, size, thread);
      if constexpr (Traits::kWithDq) {
        const uint32_t slot = turn % Traits::kSlots;
        ptx::wait(shared.empty_ds[consumer][slot], turn / Traits::kSlots % 2 ^ 1);
        __syncwarp();
        store_ds(shared.sDs[consumer][slot], rDs, thread);
        __syncwarp();
        if (ptx::elect_one()) ptx::arrive(shared.full_ds[consumer][slot]);
        ++turn;
        __syncwarp();
      }
      ptx::fence_products();
      accumulate_rows<T, kHeadDim>(rDk, rDs, shared.sQ[ring.stage]);
      ptx::commit_products();
      ptx::wait_products<0>();
      ptx::hold_registers(rDv);
      ptx::hold_registers(rDk);
    }
    __syncwarp();
    if (ptx::elect_one()) ptx::arrive(shared.empty[ring.stage]);
  }

  const DkdvItem item = shared.item;  // read here, so that it takes no registers from the loop
  if (consumer >= item.blocks) return;
  const int64_t row_block =
      (int64_t{item.batch} * params.Hkv + item.kv_head) * params.Nkv + shared.item.kv.block[consumer];
  const int64_t start = row_block * kBlock * kHeadDim;
  store_rows<T, kHeadDim>(static_cast<T*>(params.dk) + start, rDk, params.sm_scale, size, thread);
  store_rows<T, kHeadDim>(static_cast<T*>(params.dv) + start, rDv, 1, size, thread);
}

}  // namespace vsa::sm90::bwd
