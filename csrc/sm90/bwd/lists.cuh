// The lists of two blocks, walked as one.
#pragma once

#include <climits>

#include "traits.cuh"

namespace vsa::sm90::bwd {

// The union of kConsumers ascending lists, ascending. Held by one thread, which has time: it looks for a step while the
// stages before it are worked on.
class UnionWalk {
 public:
  // Lists are runs of `entries`.
  __device__ __forceinline__ explicit UnionWalk(const int* entries) : entries_(entries) {}

  __device__ __forceinline__ void start(int consumer, int begin, int end) {
    next_[consumer] = begin;
    end_[consumer] = end;
    head_[consumer] = read(consumer);
  }

  // The next step; its `wanted` is 0 at the end.
  __device__ __forceinline__ Step step() {
    Step step{min(head_[0], head_[1]), 0};
    if (step.block == kNone) return step;
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      if (head_[c] != step.block) continue;
      step.wanted |= 1 << c;
      head_[c] = read(c);
    }
    return step;
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
};

}  // namespace vsa::sm90::bwd
