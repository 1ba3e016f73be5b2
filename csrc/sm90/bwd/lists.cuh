// The lists of two neighbouring blocks, walked as one.
#pragma once

#include <climits>

#include "traits.cuh"

namespace vsa::sm90::bwd {

// Ids of the union of kConsumers ascending lists, ascending. Held by one thread.
//
// The entry after a list's head is known with the head: `read_ahead`, once after each step, fetches the one after that,
// whose latency passes while the step is worked on.
class UnionWalk {
 public:
  // Lists are runs of `entries`.
  __device__ __forceinline__ explicit UnionWalk(const int* entries) : entries_(entries) {}

  __device__ __forceinline__ void start(int consumer, int begin, int end) {
    next_[consumer] = begin;
    end_[consumer] = end;
    head_[consumer] = read(consumer);
    after_[consumer] = read(consumer);
  }

  // The next id, and which consumers list it; false at the end.
  __device__ __forceinline__ bool step(int& id, int& wanted) {
    id = min(head_[0], head_[1]);
    wanted = 0;
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      if (head_[c] != id) continue;
      wanted |= 1 << c;
      head_[c] = after_[c];
    }
    return id != kNone;
  }

  // For the consumers that wanted the last step.
  __device__ __forceinline__ void read_ahead(int wanted) {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      if (wanted >> c & 1) after_[c] = read(c);
    }
  }

  // Which consumers list what step() gives next; 0 at the end.
  __device__ __forceinline__ int peek() const {
    const int id = min(head_[0], head_[1]);
    return id == kNone ? 0 : int{head_[0] == id} | int{head_[1] == id} << 1;
  }

 private:
  static constexpr int kNone = INT_MAX;
  static_assert(kConsumers == 2, "the least of two heads");

  __device__ __forceinline__ int read(int consumer) {
    return next_[consumer] == end_[consumer] ? kNone : __ldg(entries_ + next_[consumer]++);
  }

  const int* const entries_;
  int next_[kConsumers];
  int end_[kConsumers];
  int head_[kConsumers];
  int after_[kConsumers];
};

}  // namespace vsa::sm90::bwd
