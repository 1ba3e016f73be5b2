// The Scheduler warp: merges the lists of a work item's q blocks into rounds, in which each stream has a tile or none.
//
// The parts of a stream are merged by ascending ids, so that a tile which both list is one step. Across streams, a tile
// that both want is a round of its own, copied once. A tile of one stream waits for a tile of the other, and the two
// make a round: taken in the order of ids, one stream would idle through the runs of the other. Lists that do not
// ascend are walked right, too, entry by entry; they then share less. Tiles without keys are dropped here: no one else
// meets one.
#pragma once

#include <climits>

#include "../../ptx/warp.cuh"
#include "traits.cuh"

namespace vsa::sm100::fwd {

// A list as it is read, tile by tile: a lane has each of the next tiles, as words without parts. The lanes agree about
// all else.
template <typename Traits>
class ListCursor {
 public:
  __device__ __forceinline__ void open(const ForwardParams& params, int64_t list, int lane) {
    entries_ = params.kv_indices + list * params.M;
    sizes_ = params.kv_block_sizes;
    lane_ = lane;
    next_ = 0;
    count_ = params.kv_num_blocks[list] * Traits::kTilesOfBlock;
    read();
  }
  __device__ __forceinline__ void close() { next_ = count_ = 0; }

  // The word of the next tile that has keys, 0 behind the last.
  __device__ __forceinline__ uint32_t peek() {
    while (next_ < count_) {
      const uint32_t word = __shfl_sync(ptx::kWholeWarp, window_, next_ % kWarp);
      if (word != 0) return word;
      advance();
    }
    return 0;
  }
  __device__ __forceinline__ void advance() {
    if (++next_ % kWarp == 0) read();
  }

 private:
  __device__ __forceinline__ void read() {
    const int at = next_ + lane_;
    window_ = 0;
    if (at >= count_) return;
    const int block = entries_[at / Traits::kTilesOfBlock];
    const int part = at % Traits::kTilesOfBlock;
    const int keys = min(sizes_[block] - part * kTile, kTile);
    if (keys > 0) window_ = Round::make(block * Traits::kTilesOfBlock + part, keys, 0);
  }

  const int* entries_ = nullptr;
  const int* sizes_ = nullptr;
  int lane_ = 0, next_ = 0, count_ = 0;
  uint32_t window_ = 0;
};

// Tiles of one stream that wait for some of the other: lane i has those at places i modulo 32.
struct Queue {
  uint32_t words = 0;
  uint32_t head = 0, tail = 0;

  __device__ __forceinline__ bool is_empty() const { return head == tail; }
  __device__ __forceinline__ bool is_full() const { return tail - head == kWarp; }
  __device__ __forceinline__ void push(uint32_t word, int lane) {
    if (lane == static_cast<int>(tail % kWarp)) words = word;
    ++tail;
  }
  __device__ __forceinline__ uint32_t pop() { return __shfl_sync(ptx::kWholeWarp, words, head++ % kWarp); }
};

template <typename Traits>
class Scheduler {
 public:
  __device__ Scheduler(const ForwardParams& params, SharedStorage<Traits>& shared, int lane)
      : params_(params), shared_(shared), lane_(lane) {}

  __device__ void run() {
    const WorkItems<Traits> items(params_);
    for (int number = blockIdx.x; number < items.count; number += gridDim.x) {
      open(items.decode(params_, number));
      while (take_tile()) {
      }
      while (!queues_[0].is_empty() || !queues_[1].is_empty()) hand_out_waiting();
      write_held(true);
    }
  }

 private:
  __device__ __forceinline__ void open(const WorkItem& item) {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part) {
        const int q_block = (item.stack + stream) * Traits::kParts + part;
        if (q_block < params_.Nq) {
          lists_[stream][part].open(params_, int64_t{item.row} * params_.Nq + q_block, lane_);
        } else {
          lists_[stream][part].close();
        }
      }
    }
  }

  // The next tile of a stream, 0 if there is none.
  __device__ __forceinline__ uint32_t peek(ListCursor<Traits> (&lists)[Traits::kParts]) {
    if constexpr (Traits::kParts == 1) {
      const uint32_t word = lists[0].peek();
      return word == 0 ? 0 : word | 1u << 27;
    } else {
      const uint32_t first = lists[0].peek();
      const uint32_t second = lists[1].peek();
      if (first == second) return first == 0 ? 0 : first | 3u << 27;
      const bool takes_first = second == 0 || (first != 0 && Round::tile(first) < Round::tile(second));
      return takes_first ? first | 1u << 27 : second | 2u << 27;
    }
  }
  __device__ __forceinline__ void advance(ListCursor<Traits> (&lists)[Traits::kParts], uint32_t word) {
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part) {
      if (Round::parts(word) >> part & 1) lists[part].advance();
    }
  }

  // Takes the lowest tile that a stream has next. False if there is none.
  __device__ __forceinline__ bool take_tile() {
    const uint32_t first = peek(lists_[0]);
    const uint32_t second = peek(lists_[1]);
    if (first == 0 && second == 0) return false;
    const int tiles[kStreams] = {first == 0 ? INT_MAX : Round::tile(first),
                                 second == 0 ? INT_MAX : Round::tile(second)};
    const bool with_first = tiles[0] <= tiles[1];
    const bool with_second = tiles[1] <= tiles[0];
    if (with_first) advance(lists_[0], first);
    if (with_second) advance(lists_[1], second);
    if (with_first && with_second) {
      hand_out(first, second);
    } else {
      if (with_first) queues_[0].push(first, lane_);
      if (with_second) queues_[1].push(second, lane_);
      const bool paired = !queues_[0].is_empty() && !queues_[1].is_empty();
      if (paired || queues_[0].is_full() || queues_[1].is_full()) hand_out_waiting();
    }
    return true;
  }

  __device__ __forceinline__ void hand_out_waiting() {
    const uint32_t first = queues_[0].is_empty() ? 0 : queues_[0].pop();
    const uint32_t second = queues_[1].is_empty() ? 0 : queues_[1].pop();
    hand_out(first, second);
  }

  // Holds the round back until the next one is there: only then it is known not to be the last.
  __device__ __forceinline__ void hand_out(uint32_t first, uint32_t second) {
    if (held_[0] != 0 || held_[1] != 0) write_held(false);
    held_[0] = first;
    held_[1] = second;
  }

  __device__ __forceinline__ void write_held(bool last) {
    ptx::wait(shared_.round_empty[ring_.stage], ring_.parity ^ 1);
    if (lane_ == 0) {
      Round& round = shared_.rounds[ring_.stage];
      round.words[0] = held_[0];
      round.words[1] = held_[1];
      round.last = last;
      ptx::arrive(shared_.round_full[ring_.stage]);
    }
    ring_.advance();
    held_[0] = held_[1] = 0;
  }

  const ForwardParams& params_;
  SharedStorage<Traits>& shared_;
  const int lane_;
  ListCursor<Traits> lists_[kStreams][Traits::kParts];
  Queue queues_[kStreams];
  uint32_t held_[kStreams] = {0, 0};
  ptx::RingPosition<Traits::kRounds> ring_;
};

// The rounds of all items of this block, one after the other, as one of their readers sees them.
template <typename Traits>
class RoundReader {
 public:
  __device__ RoundReader(const ForwardParams& params, SharedStorage<Traits>& shared)
      : shared_(shared), items_(params), number_(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)) {}

  // The next round, and whether it is the first of its item; false if there is none. By a whole warp, or by a single
  // thread, whose arrival then counts as its warp's.
  template <bool kAlone>
  __device__ __forceinline__ bool next(Round& round, bool& begins) {
    begins = ends_;
    if (begins) number_ += gridDim.x;
    if (number_ >= items_.count) return false;
    ptx::wait(shared_.round_full[ring_.stage], ring_.parity);
    round = shared_.rounds[ring_.stage];
    if constexpr (kAlone) {
      ptx::arrive(shared_.round_empty[ring_.stage]);
    } else {
      ptx::arrive_warp(shared_.round_empty[ring_.stage]);
    }
    ring_.advance();
    ends_ = round.last != 0;
    return true;
  }

  __device__ __forceinline__ WorkItem item(const ForwardParams& params) const { return items_.decode(params, number_); }

 private:
  SharedStorage<Traits>& shared_;
  const WorkItems<Traits> items_;
  int number_;  // of the item
  bool ends_ = true;
  ptx::RingPosition<Traits::kRounds> ring_;
};

}  // namespace vsa::sm100::fwd
