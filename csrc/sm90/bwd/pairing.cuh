// Which two kv blocks make a work item: those whose lists share most q blocks.
//
// What both want is loaded once, and its dq leaves once, through L2 as through shared memory: both bound the fused
// kernel (NOTES.md). Pairs are worth most where neighbours along the queries share their lists and neighbours along the
// keys do not.
//
// A block of threads pairs a group of neighbouring kv blocks of one (batch, kv head):
//
//   masks  [kv block][q blocks / 32]  one bit for each q block that lists it, some words at a time
//   keys   [kv block][kv block]       how many bits two of them share; the nearer one first where that is equal
//
// Then in rounds: everybody looks for the best one left, and who look for each other are a pair. The two with the
// largest key always do. What comes out depends on nothing but the lists.
#pragma once

#include "../../ptx/warp.cuh"
#include "dkdv_item.cuh"

namespace vsa::sm90::bwd {

constexpr int kPairingThreads = 1024;
// Larger groups find hardly better pairs (NOTES.md), and the keys of 128 fit in 48 KB.
constexpr int kPairingGroup = 128;
constexpr int kMaskWords = 8;
constexpr int kTile = 4;  // a thread has the keys of 4 by 4 pairs
static_assert(kPairingGroup * kPairingGroup == kTile * kTile * kPairingThreads, "all pairs, once");

__host__ __device__ inline int pairing_groups(const AttentionBackwardParams& params) {
  return (params.Nkv + kPairingGroup - 1) / kPairingGroup;
}

class Pairing {
 public:
  struct Shared {
    uint32_t masks[kPairingGroup][kMaskWords + 1];  // one more, so that a column of them has no bank twice
    uint16_t keys[kPairingGroup][kPairingGroup];
    int best[kPairingGroup];
    int partner[kPairingGroup];
    int length[kPairingGroup];
    int left, items;
  };

  // `number`: of the group, counted over all (batch, kv head).
  __device__ __forceinline__ Pairing(const AttentionBackwardParams& params, Shared& shared, int number)
      : params_(params), shared_(shared), groups_(pairing_groups(params)) {
    row_ = number / groups_;
    first_ = (number - row_ * groups_) * kPairingGroup;
    size_ = min(kPairingGroup, params.Nkv - first_);
  }

  // Writes the items of the group, and what they cost, to their places among all items.
  __device__ __forceinline__ void run(KvPair* items, int* costs) {
    const int thread = threadIdx.x;
    if (thread < kPairingGroup) {
      shared_.partner[thread] = thread < size_ ? kFree : kAbsent;
      shared_.length[thread] = 0;
    }
    if (thread == 0) shared_.left = size_, shared_.items = 0;
    __syncthreads();
    find_keys();
    while (shared_.left > 1) {
      find_best();
      __syncthreads();
      if (thread < kPairingGroup && shared_.partner[thread] == kFree) {
        const int other = shared_.best[thread];
        if (shared_.best[other] == thread) {
          shared_.partner[thread] = other;
          atomicSub(&shared_.left, 1);
        }
      }
      __syncthreads();
    }
    if (thread >= size_) return;
    const int other = shared_.partner[thread];
    if (other != kFree && other < thread) return;
    const int place = row_ * dkdv_items_of_head(params_) + first_ / kConsumers + atomicAdd(&shared_.items, 1);
    if (other == kFree) {
      items[place] = {{first_ + thread, -1}};
      costs[place] = 2 * shared_.length[thread];
    } else {
      items[place] = {{first_ + thread, first_ + other}};
      costs[place] = 2 * (shared_.length[thread] + shared_.length[other]) - shared_bits(thread, other);
    }
  }

 private:
  static constexpr int kFree = -1, kAbsent = -2;
  static constexpr int kWarps = kPairingThreads / kWarp;
  static constexpr int kRows = kPairingGroup / kWarps;  // of a warp
  static constexpr int kBits = kMaskWords * 32;
  static constexpr int kMostShared = 510;
  static_assert(kMostShared * kPairingGroup + kPairingGroup <= 0xffff, "keys have 16 bits");

  // Bits shared are counted in units of so many that the count fits into a key.
  __device__ __forceinline__ int unit_bits() const {
    const int most = params_.Hq / params_.Hkv * params_.Nq;
    int bits = 0;
    while (most >> bits > kMostShared) ++bits;
    return bits;
  }

  __device__ __forceinline__ int shared_bits(int i, int j) const {
    return (shared_.keys[i][j] - 1) / kPairingGroup << unit_bits();
  }

  __device__ __forceinline__ void find_keys() {
    const int warp = threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp;
    const int heads = params_.Hq / params_.Hkv;
    int counts[kTile][kTile] = {};
    for (int head = row_ * heads; head < (row_ + 1) * heads; ++head) {
      const int* entries = params_.q_indices + int64_t{head} * params_.Nq * params_.M;
      const int* offsets = params_.q_offsets + int64_t{head} * (params_.Nkv + 1) + first_;
      int next[kRows], end[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const int block = warp * kRows + m;
        const bool listed = block < size_ && params_.kv_block_sizes[first_ + block] != 0;
        next[m] = listed ? offsets[block] : 0;
        end[m] = listed ? offsets[block + 1] : 0;
        if (lane == 0 && listed) shared_.length[block] += end[m] - next[m];
      }
      for (int first_q = 0; first_q < params_.Nq; first_q += kBits) {
        __syncthreads();  // the masks before these have been read
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          uint32_t* mask = shared_.masks[warp * kRows + m];
          if (lane < kMaskWords) mask[lane] = 0;
          __syncwarp();
          for (int found = kWarp; found == kWarp;) {
            const int at = next[m] + lane;
            const int bit = at < end[m] ? __ldg(entries + at) - first_q : kBits;
            if (bit < kBits) atomicOr(mask + bit / 32, 1u << bit % 32);
            found = __popc(__ballot_sync(ptx::kWholeWarp, bit < kBits));
            next[m] += found;
          }
        }
        __syncthreads();
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) {
          uint32_t own[kTile], other[kTile];
#pragma unroll
          for (int m = 0; m < kTile; ++m) {
            own[m] = shared_.masks[warp * kTile + m][word];
            other[m] = shared_.masks[lane + kWarp * m][word];
          }
#pragma unroll
          for (int m = 0; m < kTile * kTile; ++m) {
            counts[m / kTile][m % kTile] += __popc(own[m / kTile] & other[m % kTile]);
          }
        }
      }
    }
    const int unit = unit_bits();
#pragma unroll
    for (int m = 0; m < kTile * kTile; ++m) {
      const int i = warp * kTile + m / kTile, j = lane + kWarp * (m % kTile);
      const int common = min(counts[m / kTile][m % kTile] >> unit, kMostShared);
      // 0: no partner. i ^ j is another one for every j, so that keys of a row differ.
      shared_.keys[i][j] = i == j ? 0 : common * kPairingGroup + (kPairingGroup - 1 - (i ^ j)) + 1;
    }
    __syncthreads();
  }

  // Of each kv block that is left, the one left with the largest key.
  __device__ __forceinline__ void find_best() {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int i = threadIdx.x / kWarp * kRows + m;
      if (shared_.partner[i] != kFree) continue;
      int best = 0;
#pragma unroll
      for (int n = 0; n < kPairingGroup / kWarp; ++n) {
        const int j = lane + kWarp * n;
        if (shared_.partner[j] == kFree) best = max(best, int{shared_.keys[i][j]});
      }
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        best = max(best, __shfl_xor_sync(ptx::kWholeWarp, best, distance));
      }
      if (lane == 0) shared_.best[i] = i ^ (kPairingGroup - 1 - (best - 1) % kPairingGroup);
    }
  }

  const AttentionBackwardParams& params_;
  Shared& shared_;
  const int groups_;
  int row_, first_, size_;
};

}  // namespace vsa::sm90::bwd
