// The scheduler warp: merges the lists of a work item's two q tiles into one sequence of tiles to copy, and tells every
// consumer which of them are its own, and where they will stand.
//
// It reads both lists up to the same id, a lane an entry, and looks the tiles of one up in the other by halving. Tiles
// that both list go out as they are found. A tile of one list goes out together with one of the other, so that a few
// stages of the rings always hold work for both: in the order of ids, one consumer would often wait for the other to
// get through a run of its own. Only entries that ascend strictly are looked at together; so a list that does not
// ascend as a whole is still walked entry by entry, in order, and right, just in more steps. Tiles without keys are
// dropped here: no one else meets one.
//
// Why nobody waits in a circle, and no parity deceives. Turn t (consumer.cuh) uses V of round t - 1 and K of round t,
// rounds counted through all items; a round has at most kConsumers * kStepTiles tiles, and turns are strictly in order:
// t of consumer 0, t of consumer 1, t + 1 of consumer 0. So when a turn looks at its tiles, both consumers have had the
// products with K of rounds before t and with V of rounds before t - 1: what stood in the stages before is used, and is
// being released without further waits. All that stood there has landed, so each full barrier is in the phase that is
// looked for, or has completed it; a parity could not tell the phase from the one before the last.
//
// In turn t a consumer may wait for record r, of round t + 2. The records before it have a round each at least, so
// record r - kRecords has rounds up to t - 2; what they replace in the rings is of rounds up to t - 3, which both
// consumers have released in turns up to t - 2, and the other one has passed turn t - 1. So the loaders get through
// record r - kRecords, and record r is written.
#pragma once

#include <climits>

#include "../../ptx/prefetch.cuh"
#include "../../ptx/warp.cuh"
#include "traits.cuh"

namespace vsa::sm90::fwd {

// The list of one q tile as it is read. All lanes hold the same.
struct ListCursor {
  const int* entries = nullptr;
  int count = 0;
  int next = 0;
  __device__ bool is_read() const { return next >= count; }
};

// A queue in `SharedStorage::pending`. All lanes hold the same.
struct Queue {
  uint32_t head = 0, tail = 0;
  __device__ int length() const { return static_cast<int>(tail - head); }
};

template <typename Traits>
class Scheduler {
 public:
  using Shared = SharedStorage<Traits>;

  __device__ Scheduler(const AttentionForwardParams& params, Shared& shared, int lane)
      : params_(params), shared_(shared), lane_(lane) {}

  __device__ void run() {
    const WorkItems<Traits> items(params_);
    prefetch(items);
    for (int number = blockIdx.x; number < items.count; number += gridDim.x) {
      const WorkItem<Traits> item = items.decode(params_, number);
#pragma unroll
      for (int g = 0; g < kConsumers; ++g) {
        lists_[g] = {};
        const int q_tile = item.q_tile + g;
        if (q_tile >= items.q_tiles) continue;
        const int64_t list = int64_t{item.row} * params_.Nq + q_tile / Traits::kSubBlocks;
        lists_[g].entries = params_.kv_indices + list * params_.M;
        lists_[g].count = params_.kv_num_blocks[list];
      }
      do {
        read();
      } while (!hand_out());
    }
  }

 private:
  static constexpr int kNone = INT_MAX;
  static constexpr int kBoth = kConsumers;  // the queue of tiles that both list

  // The first copy waits for three loads that depend on each other: a count, ids, their sizes. Ids and sizes are
  // fetched into L2 meanwhile, as far as the first lanes' lines reach.
  __device__ void prefetch(const WorkItems<Traits>& items) const {
    constexpr int kLine = 32;  // ints
    const WorkItem<Traits> item = items.decode(params_, blockIdx.x);
    const int block = item.q_tile / Traits::kSubBlocks;
    const int64_t list = int64_t{item.row} * params_.Nq + block;
    if (lane_ < kConsumers / Traits::kSubBlocks && block + lane_ < params_.Nq)
      ptx::prefetch(params_.kv_indices + (list + lane_) * params_.M);
    if (lane_ * kLine < params_.Nkv) ptx::prefetch(params_.kv_block_sizes + lane_ * kLine);
  }

  // The next tiles of a list, one a lane, kNone behind them: a run of ascending ones.
  __device__ int next_tile(const ListCursor& list) const {
    const int at = list.next + lane_ / Traits::kSubBlocks;
    const int tile = at < list.count ? list.entries[at] * Traits::kSubBlocks + lane_ % Traits::kSubBlocks : kNone;
    const int before = __shfl_up_sync(ptx::kWholeWarp, tile, 1);
    const unsigned breaks = __ballot_sync(ptx::kWholeWarp, lane_ > 0 && tile <= before && tile != kNone);
    return breaks != 0 && lane_ >= __ffs(breaks) - 1 ? kNone : tile;
  }

  // The tile up to which `tiles` is all there is of a list; kNone if they are the whole rest.
  __device__ static int known_up_to(const ListCursor& list, int tiles) {
    const int count = __popc(__ballot_sync(ptx::kWholeWarp, tiles != kNone));
    const int last = __shfl_sync(ptx::kWholeWarp, tiles, max(count - 1, 0));
    return list.next + count / Traits::kSubBlocks >= list.count ? kNone : last;
  }

  // The lane where `tile` stands in ascending `tiles`, if it does.
  __device__ static int find(int tiles, int tile) {
    int at = 0;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      if (__shfl_sync(ptx::kWholeWarp, tiles, at + distance - 1) < tile) at += distance;
    }
    return at;
  }

  // A tile and its keys as one word, 0 if there is no tile or it has no keys: no one meets those.
  __device__ uint32_t sized(int tile) const {
    if (tile == kNone) return 0;
    const int keys = params_.kv_block_sizes[tile / Traits::kSubBlocks] - tile % Traits::kSubBlocks * kTile;
    return keys <= 0 ? 0 : static_cast<uint32_t>(tile) | static_cast<uint32_t>(min(keys, kTile)) << 20;
  }

  __device__ void push(int queue, uint32_t tile) {
    const unsigned lanes = __ballot_sync(ptx::kWholeWarp, tile != 0);
    const uint32_t place = queues_[queue].tail + __popc(lanes & ((1u << lane_) - 1));
    if (tile != 0) shared_.pending[queue][place % kPending] = tile;
    queues_[queue].tail += __popc(lanes);
  }

  // Reads on in the lists as far as both are known, and sorts what stands there by who wants it. A list of which much
  // waits already is not read: lists with little in common then miss a common tile, and do not keep each other up.
  __device__ void read() {
    int tiles[kConsumers];
    int limit = kNone;
#pragma unroll
    for (int g = 0; g < kConsumers; ++g) {
      const bool waits = queues_[g].length() > kPending - kWindow;
      tiles[g] = waits ? kNone : next_tile(lists_[g]);
      if (!waits) limit = min(limit, known_up_to(lists_[g], tiles[g]));
    }
#pragma unroll
    for (int g = 0; g < kConsumers; ++g) {
      if (tiles[g] > limit) tiles[g] = kNone;
      lists_[g].next += __popc(__ballot_sync(ptx::kWholeWarp, tiles[g] != kNone)) / Traits::kSubBlocks;
    }
    const int at = find(tiles[1], tiles[0]);
    const bool found = __shfl_sync(ptx::kWholeWarp, tiles[1], at) == tiles[0] && tiles[0] != kNone;
    const unsigned found_at = __reduce_or_sync(ptx::kWholeWarp, found ? 1u << at : 0);
    const uint32_t first = sized(tiles[0]);
    const uint32_t second = sized(found_at >> lane_ & 1 ? kNone : tiles[1]);
    push(kBoth, found ? first : 0);
    push(0, found ? 0 : first);
    push(1, second);
    __syncwarp();
  }

  // Writes records of all that both consumers can go on with. True when that was the end of the item.
  __device__ bool hand_out() {
    const bool ended[kConsumers] = {lists_[0].is_read(), lists_[1].is_read()};
    while (true) {
      int both = min(queues_[kBoth].length(), kRecordTiles);
      int pairs = min(min(queues_[0].length(), queues_[1].length()), kRecordTiles - both);
      const int left[kConsumers] = {queues_[0].length() - pairs, queues_[1].length() - pairs};
      // Of one list alone, only where the other has ended.
      const int rest_of = left[0] == 0 && ended[0] ? 1 : 0;
      const bool alone = rest_of == 1 || (left[1] == 0 && ended[1]);
      int rest = alone ? min(rest_of == 1 ? left[1] : left[0], kRecordTiles - both - pairs) : 0;
      const bool last = ended[0] && ended[1] && left[0] + left[1] == rest && queues_[kBoth].length() == both;
      // Whole steps, until the item ends.
      if (!last && (both + pairs + rest) % kStepTiles != 0) --(rest > 0 ? rest : pairs > 0 ? pairs : both);
      if (both + pairs + rest == 0 && !last) return false;
      write_record(both, pairs, rest_of, rest, last);
      if (last) return true;
    }
  }

  // A record of tiles that both want, of pairs of tiles, one for each, and of `rest` tiles of one: whatever it is, both
  // consumers make their way through it at one pace.
  __device__ void write_record(int both, int pairs, int rest_of, int rest, bool last) {
    Record& record = shared_.records[ring_.stage];
    ptx::wait(shared_.record_empty[ring_.stage], ring_.parity ^ 1);
    const uint32_t count = both + 2 * pairs + rest;
    const uint32_t lane = lane_;
    const int own = lane_ - both;  // among the tiles of one consumer
    const bool is_paired = own < 2 * pairs;
    const int user = is_paired ? own & 1 : rest_of;
    const int place = is_paired ? own >> 1 : own - pairs;  // among those of this user
    if (lane < count) {
      const bool is_shared = own < 0;
      const int queue = is_shared ? kBoth : user;
      const uint32_t head = is_shared ? queues_[kBoth].head : user == 0 ? queues_[0].head : queues_[1].head;
      const uint32_t tile = shared_.pending[queue][(head + (is_shared ? lane_ : place)) % kPending];
      const Entry entry = Entry::make<Traits::kKeyStages, Traits::kValueStages>(
          (key_slot_ + lane) % kKeySlots, (value_slot_ + lane) % kValueSlots, tile >> 20);
      const int at = is_shared ? lane_ : both + place;
      if (is_shared || user == 0) record.entries[0][at] = entry;
      if (is_shared || user == 1) record.entries[1][at] = entry;
      record.loads[lane] = tile | (is_shared ? 2u : 1u) << 27;
    }
    queues_[kBoth].head += both;
#pragma unroll
    for (int g = 0; g < kConsumers; ++g) {
      const int given = pairs + (g == rest_of ? rest : 0);
      queues_[g].head += given;
      if (lane_ >= both + given && lane_ < kRecordTiles) record.entries[g][lane_] = {0};
    }
    if (lane == 0) {
      record.num_loads = count;
      // An item without tiles has a round too, which ends it.
      record.num_rounds = max((both + pairs + rest + kStepTiles - 1) / kStepTiles, 1);
      record.last = last;
    }
    ptx::arrive_warp(shared_.record_full[ring_.stage]);
    ring_.advance();
    key_slot_ = (key_slot_ + count) % kKeySlots;
    value_slot_ = (value_slot_ + count) % kValueSlots;
  }

  static constexpr uint32_t kKeySlots = 2 * Traits::kKeyStages;
  static constexpr uint32_t kValueSlots = 2 * Traits::kValueStages;

  const AttentionForwardParams& params_;
  Shared& shared_;
  const int lane_;
  ListCursor lists_[kConsumers];
  Queue queues_[kConsumers + 1];
  ptx::RingPosition<kRecords> ring_;
  uint32_t key_slot_ = 0, value_slot_ = 0;  // of the next tile in the rings
};

// What a consumer does in a round, of no, one or two tiles.
struct Step {
  Entry first, second;
  bool ends;  // the item
  bool over;  // not a round: the last item has ended

  __device__ int tiles() const { return first.is_none() ? 0 : second.is_none() ? 1 : 2; }
  __device__ bool is_whole() const { return !second.is_none(); }
};

// A consumer's way through the rounds of all items of its block. Whole warps call it.
template <typename Traits>
class StepReader {
 public:
  __device__ StepReader(SharedStorage<Traits>& shared, int consumer, int items)
      : shared_(shared), consumer_(consumer), items_(items) {}

  __device__ Step next() {
    if (count_ == 0) open_record();
    const Step step = take();
    advance();
    return step;
  }

  // The two halves of `next`: the step, and what the one after it needs.
  __device__ Step take() {
    if (items_ == 0) return {{0}, {0}, false, true};
    const Entry* step = shared_.records[ring_.stage].entries[consumer_] + at_ * kStepTiles;
    ++at_;
    return {step[0], step[1], last_ && at_ == count_, false};
  }
  __device__ void advance() {
    if (at_ != count_ || items_ == 0) return;
    ptx::arrive_warp(shared_.record_empty[ring_.stage]);
    ring_.advance();
    if (last_) --items_;
    if (items_ != 0) open_record();
  }

 private:
  __device__ void open_record() {
    const Record& record = shared_.records[ring_.stage];
    ptx::wait(shared_.record_full[ring_.stage], ring_.parity);
    at_ = 0;
    count_ = record.num_rounds;
    last_ = record.last != 0;
  }

  SharedStorage<Traits>& shared_;
  const int consumer_;
  int items_;  // that have not ended
  ptx::RingPosition<kRecords> ring_;
  uint32_t at_ = 0, count_ = 0;
  bool last_ = false;  // the open record is, of its item
};

}  // namespace vsa::sm90::fwd
