// Products of row blocks: [64, D] in shared memory as boxes leave it, 64 columns a box.
#pragma once

#include "../../ptx/wgmma.cuh"
#include "traits.cuh"

namespace vsa::sm90::bwd {

// D [64, 64] = A B^T for A, B [64, kHeadDim], both row blocks as boxes leave them.
template <typename T, int kHeadDim>
__device__ __forceinline__ void multiply_rows(float (&d)[32], const uint8_t* a, const uint8_t* b) {
  const uint64_t descriptor_a = ptx::matrix_descriptor(a);
  const uint64_t descriptor_b = ptx::matrix_descriptor(b);
  constexpr int kStepsOfBox = kBoxColumns / kDepth;
#pragma unroll
  for (int k = 0; k < kHeadDim / kDepth; ++k) {
    const int offset = k / kStepsOfBox * kBoxBytes + k % kStepsOfBox * kDepth * kElementBytes;
    ptx::Wgmma<T, 64>::template multiply<ptx::Major::kK, ptx::Major::kK>(
        d, ptx::advance_descriptor(descriptor_a, offset), ptx::advance_descriptor(descriptor_b, offset), k > 0);
  }
}

// d += A B for A [64, 64] as packed fragments and B [64, kHeadDim], a row block as boxes leave it.
template <typename T, int kHeadDim>
__device__ __forceinline__ void accumulate_rows(float (&d)[kHeadDim / 2], const uint32_t (&a)[4][4], const uint8_t* b) {
  const uint64_t descriptor = ptx::matrix_descriptor(b, kBoxBytes);
  constexpr int kStepBytes = kDepth * kBoxColumns * kElementBytes;
#pragma unroll
  for (int k = 0; k < kBlock / kDepth; ++k) {
    ptx::Wgmma<T, kHeadDim>::template multiply<ptx::Major::kMn>(
        d, a[k], ptx::advance_descriptor(descriptor, k * kStepBytes), true);
  }
}

// D [64, 64] = A B^T for A [64, kHeadDim] as fragments and B [64, kHeadDim] a row block.
template <typename T, int kHeadDim>
__device__ __forceinline__ void multiply_rows(float (&d)[32], const uint32_t (&a)[kHeadDim / kDepth][4],
                                              const uint8_t* b) {
  const uint64_t descriptor = ptx::matrix_descriptor(b);
  constexpr int kStepsOfBox = kBoxColumns / kDepth;
#pragma unroll
  for (int k = 0; k < kHeadDim / kDepth; ++k) {
    const int offset = k / kStepsOfBox * kBoxBytes + k % kStepsOfBox * kDepth * kElementBytes;
    ptx::Wgmma<T, 64>::template multiply<ptx::Major::kK>(d, a[k], ptx::advance_descriptor(descriptor, offset), k > 0);
  }
}

}  // namespace vsa::sm90::bwd
