// The instantiation that runs for each head dim and block size.
#pragma once

#include "traits.cuh"

namespace vsa::sm90::fwd {

// Two consumers with two kv tiles a step: the fastest on an H200 (../../NOTES.md). Stages: all of the 227 KB that
// records and barriers leave.
template <int kHeadDim>
struct Stages;

template <>
struct Stages<128> {
  static constexpr int kKeys = 7;
  static constexpr int kValues = 7;
};

// Tiles of half the size.
template <>
struct Stages<64> {
  static constexpr int kKeys = 14;
  static constexpr int kValues = 14;
};

template <typename T, int kHeadDim, int kBlockSize>
using Chosen = ForwardTraits<T, kHeadDim, kBlockSize / kTile, Stages<kHeadDim>::kKeys, Stages<kHeadDim>::kValues>;

}  // namespace vsa::sm90::fwd
