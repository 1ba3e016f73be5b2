// The scheduler warp: merges the lists of a work item's q tiles into one sequence of tiles to copy, and tells every
// consumer which of them are its own, and where they will stand.
//
// A step takes the next 32 entries of every list, one a lane, and a window of kWindow tiles that starts at the least of
// the lists' next ids. Every list is consumed up to the window's end: as bits, the union and the places in it are a
// handful of instructions whatever the lists are. Only entries that ascend strictly from the head on are looked at in a
// step. So a list that does not ascend as a whole is still walked entry by entry, in order, and right, just in more
// steps. Tiles without keys are dropped here: no one else meets an empty one.
//
// Why nobody waits in a circle. Copies go through the rings of K and V in one order, each ring waiting for its own
// stages only. Suppose both stand still, V before copy x and K before copy y, counted in tiles.
//
// V stage x - kValueStages is held by a consumer B, whose first unfinished tile is b <= x - kValueStages. It waits for
// no V: that would be one >= x of the same step, which kStepReach forbids. So it waits for a K, one >= y of the step
// after, and y < b + kOverlapReach <= x + kKeyStages.
//
// K stage y - kKeyStages is held by a consumer C. It waits for no K: that would be one >= y of the same step. So it
// waits for a V, one >= x of the step before, and x < y - kKeyStages: a contradiction.
//
// Record r can be written when all have left r - kRecords. Who waits for r has its first unfinished tile in a later
// record than that (StepReader::look), so it does not keep the loaders there.
#pragma once

#include <climits>

#include "../../ptx/shared_word.cuh"
#include "../../ptx/warp.cuh"
#include "traits.cuh"

namespace vsa::sm90::fwd {

// The list of one q tile. All lanes hold the same.
struct ListCursor {
  const int* entries = nullptr;
  int count = 0;
  int next = 0;
};

template <typename Traits>
class Scheduler {
 public:
  using Shared = SharedStorage<Traits>;

  __device__ Scheduler(const AttentionForwardParams& params, Shared& shared, int lane)
      : params_(params), shared_(shared), lane_(lane) {}

  __device__ void run() {
    const WorkItems<Traits> items(params_);
    for (int number = blockIdx.x; number < items.count; number += gridDim.x) {
      const WorkItem<Traits> item = items.decode(params_, number);
      ListCursor lists[Traits::kConsumers];
#pragma unroll
      for (int g = 0; g < Traits::kConsumers; ++g) {
        const int q_tile = item.q_tile + g;
        if (q_tile >= items.q_tiles) continue;
        const int64_t list = int64_t{item.row} * params_.Nq + q_tile / Traits::kSubBlocks;
        lists[g].entries = params_.kv_indices + list * params_.M;
        lists[g].count = params_.kv_num_blocks[list];
      }
      while (!step(lists)) {
      }
    }
  }

 private:
  static constexpr int kNone = INT_MAX;
  static constexpr unsigned kWindowBlocks = kWindow / Traits::kSubBlocks;

  // The entry of this lane, kNone past the end of the list and past the run of ascending ones that starts at lane 0.
  __device__ int ascending_entry(const ListCursor& list) const {
    const int at = list.next + lane_;
    const int entry = at < list.count ? list.entries[at] : kNone;
    const int before = __shfl_up_sync(ptx::kWholeWarp, entry, 1);
    const unsigned breaks = __ballot_sync(ptx::kWholeWarp, lane_ > 0 && entry != kNone && entry <= before);
    return breaks != 0 && lane_ >= __ffs(breaks) - 1 ? kNone : entry;
  }

  // Keys of the tile that is this lane's in the window.
  __device__ int tile_size(int first_block) const {
    const int block = first_block + lane_ / Traits::kSubBlocks;
    if (first_block == kNone || block >= params_.Nkv) return 0;
    return min(params_.kv_block_sizes[block] - lane_ % Traits::kSubBlocks * kTile, kTile);
  }

  // One window. True when it was the last of the item.
  __device__ bool step(ListCursor (&lists)[Traits::kConsumers]) {
    int entries[Traits::kConsumers];
    int first_block = kNone;
#pragma unroll
    for (int g = 0; g < Traits::kConsumers; ++g) {
      entries[g] = ascending_entry(lists[g]);
      first_block = min(first_block, __shfl_sync(ptx::kWholeWarp, entries[g], 0));
    }
    const int size = tile_size(first_block);
    const unsigned not_empty = __ballot_sync(ptx::kWholeWarp, size > 0);

    unsigned own[Traits::kConsumers];
    unsigned all = 0;
    bool last = true;
#pragma unroll
    for (int g = 0; g < Traits::kConsumers; ++g) {
      const unsigned block = static_cast<unsigned>(entries[g] - first_block);
      const bool inside = entries[g] != kNone && block < kWindowBlocks;
      constexpr unsigned kBlockBits = (1u << Traits::kSubBlocks) - 1;
      own[g] = not_empty & __reduce_or_sync(ptx::kWholeWarp, inside ? kBlockBits << block * Traits::kSubBlocks : 0);
      all |= own[g];
      lists[g].next += __popc(__ballot_sync(ptx::kWholeWarp, inside));
      last = last && lists[g].next >= lists[g].count;
    }
    if (all != 0 || last) write_record(first_block, size, own, all, last);
    return last;
  }

  __device__ void write_record(int first_block, int size, const unsigned (&own)[Traits::kConsumers], unsigned all,
                               bool last) {
    Record<Traits>& record = shared_.records[ring_.stage];
    ptx::wait(shared_.record_empty[ring_.stage], ring_.parity ^ 1);
    const unsigned bit = 1u << lane_;
    if (all & bit) {
      const unsigned place = __popc(all & (bit - 1));
      const Entry entry = Entry::make<Traits::kKeyStages, Traits::kValueStages>(
          (key_slot_ + place) % kKeySlots, (value_slot_ + place) % kValueSlots, size, position_ + place);
      uint32_t wanted = 0;
#pragma unroll
      for (int g = 0; g < Traits::kConsumers; ++g) {
        if (own[g] & bit) {
          record.entries[g][__popc(own[g] & (bit - 1))] = entry;
          ++wanted;
        }
      }
      record.loads[place] = static_cast<uint32_t>(first_block * Traits::kSubBlocks + lane_) |
                            static_cast<uint32_t>(size) << 20 | wanted << 27;
    }
    if (lane_ == 0) {
      record.num_loads = __popc(all);
#pragma unroll
      for (int g = 0; g < Traits::kConsumers; ++g) record.num_entries[g] = __popc(own[g]);
      record.last = last;
    }
    ptx::arrive_warp(shared_.record_full[ring_.stage]);
    ring_.advance();
    position_ += __popc(all);
    key_slot_ = (key_slot_ + __popc(all)) % kKeySlots;
    value_slot_ = (value_slot_ + __popc(all)) % kValueSlots;
  }

  static constexpr uint32_t kKeySlots = 2 * Traits::kKeyStages;
  static constexpr uint32_t kValueSlots = 2 * Traits::kValueStages;

  const AttentionForwardParams& params_;
  Shared& shared_;
  const int lane_;
  ptx::RingPosition<kRecords> ring_;
  // Of the next tile: places in the rings, and the tiles since the block started.
  uint32_t key_slot_ = 0, value_slot_ = 0, position_ = 0;
};

// The tiles of one step of a consumer. `second` is an end in a step of one tile.
struct Step {
  Entry first, second;
  uint32_t record;  // number of the record that `first` stood in

  __device__ bool is_end() const { return first.is_end(); }
  __device__ Entry last() const { return second.is_end() ? first : second; }
};

// A consumer's way through its entries, item after item. Whole warps call it.
template <typename Traits>
class StepReader {
 public:
  __device__ StepReader(SharedStorage<Traits>& shared, int consumer) : shared_(shared), consumer_(consumer) {}

  // Before the first `next` of every item.
  __device__ void begin_item() { open_record(); }

  // The next step of the item, with nothing unfinished before it; an end after the last.
  __device__ Step next() {
    while (at_ == count_) {
      const bool ended = last_;
      close_record();
      if (ended) return {{0}, {0}, 0};
      open_record();
    }
    return take(number_);
  }

  // The next step, looked for while a step that starts in record `unfinished` is not finished. An end if there is none
  // or if looking further has to wait; `next` then knows.
  __device__ Step look_ahead(uint32_t unfinished) {
    if (!look(unfinished)) return {{0}, {0}, 0};
    return take(unfinished);
  }

  // Whether `step` can be begun before `unfinished` is finished.
  __device__ static bool may_overlap(const Step& unfinished, const Step& step) {
    const Entry last = Traits::kTilesPerStep == 1 ? step.first : step.second;
    if (last.is_end()) return false;
    return last.copies_after(unfinished.first) < Traits::kOverlapReach;
  }

  // Until the copies are on their way, from when on parities of their barriers tell the truth.
  __device__ void await_key_issue(Entry entry) { await_issue(entry, shared_.k_issued, k_issued_); }
  __device__ void await_value_issue(Entry entry) { await_issue(entry, shared_.v_issued, v_issued_); }

 private:
  // Rare: only where the ring, and not the copies, is late.
  static constexpr unsigned kPollNanoseconds = 40;

  __device__ static void await_issue(Entry entry, const uint32_t& issued, uint32_t& seen) {
    while (!entry.is_before(seen)) {
      seen = ptx::load_acquire(issued);
      if (!entry.is_before(seen)) __nanosleep(kPollNanoseconds);
    }
  }

  __device__ void open_record() {
    ptx::wait(shared_.record_full[ring_.stage], ring_.parity);
    const Record<Traits>& record = shared_.records[ring_.stage];
    at_ = 0;
    count_ = record.num_entries[consumer_];
    last_ = record.last != 0;
    ++number_;
  }

  __device__ void close_record() {
    ptx::arrive_warp(shared_.record_empty[ring_.stage]);
    ring_.advance();
  }

  // Whether there is another entry in the records that may be waited for while `unfinished` is the oldest in use.
  __device__ bool look(uint32_t unfinished) {
    while (at_ == count_) {
      if (last_ || number_ + 1 - unfinished >= kRecords) return false;
      close_record();
      open_record();
    }
    return true;
  }

  __device__ Entry peek() const { return shared_.records[ring_.stage].entries[consumer_][at_]; }

  __device__ Step take(uint32_t unfinished) {
    Step step{peek(), {0}, number_};
    ++at_;
    if constexpr (Traits::kTilesPerStep == 2) {
      if (look(unfinished)) {
        const Entry second = peek();
        if (second.copies_after(step.first) < Traits::kStepReach) {
          step.second = second;
          ++at_;
        }
      }
    }
    return step;
  }

  SharedStorage<Traits>& shared_;
  const int consumer_;
  ptx::RingPosition<kRecords> ring_;
  uint32_t number_ = 0;  // of the open record, from 1
  uint32_t at_ = 0, count_ = 0;
  bool last_ = false;
  uint32_t k_issued_ = 0, v_issued_ = 0;  // as last seen
};

}  // namespace vsa::sm90::fwd
