// Products by one thread: D += A B with D in tensor memory, B and perhaps A in shared memory, 16-bit elements, fp32
// sums, a depth of 16. PTX ISA 9.7.16.4, 9.7.16.5, 9.7.16.10.
//
// A is [M, K], B is [N, K]. Byte of element (r, k) of an operand in shared memory with 128-byte swizzle, before
// swizzling; tiles start at multiples of 1024 bytes:
//   K-major    start + (r / 8) * 1024 + (r % 8) * 128 + k * 2, k < 64. The next 16 along K stand 32 bytes further.
//   MN-major   start + (r / 64) * lead + (r % 64) * 2 + (k / 8) * 1024 + (k % 8) * 128. The next 16 along K stand 2048
//              bytes further.
// Element (m, n) of D, relative to its address:
//   M = 128               lane m, column n
//   M = 64                lane m % 16 + 32 * (m / 16), column n; with lane 16 in the address the other 16 of each 32
//   M = 64, .ws           lane m + 64 * (n / (N / 2)), column n % (N / 2)
// A in tensor memory has the lanes of D and two elements a column: the next 16 along K stand 8 columns further.
// N: multiples of 16 (of 8 where M = 64) up to 256; with .ws 64, 128 or 256.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "mbarrier.cuh"

namespace vsa::ptx {

// The 32-bit instruction descriptor: element types of T, M rows, N columns, and which operands lie MN-major.
template <typename T = __nv_bfloat16>
__host__ __device__ constexpr uint32_t product_shape(int rows, int columns, bool a_mn_major, bool b_mn_major) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>, "16-bit elements");
  constexpr uint32_t kElement = std::is_same_v<T, __nv_bfloat16> ? 1 : 0;
  constexpr uint32_t kSumsOfFloat = 1u << 4;
  return kSumsOfFloat | kElement << 7 | kElement << 10 | static_cast<uint32_t>(a_mn_major) << 15 |
         static_cast<uint32_t>(b_mn_major) << 16 | static_cast<uint32_t>(columns / 8) << 17 |
         static_cast<uint32_t>(rows / 16) << 24;
}

// The 64-bit descriptor of an operand in shared memory. `lead_bytes` counts only for an MN-major operand of more than
// 64 rows: the distance of its 64-row tiles.
__device__ __forceinline__ uint64_t operand_descriptor(const void* tile, uint32_t lead_bytes = 0) {
  constexpr uint64_t kSwizzle128 = uint64_t{2} << 61;
  constexpr uint64_t kVersion = uint64_t{1} << 46;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kVersion | kEightRows | uint64_t{(lead_bytes & 0x3ffff) >> 4} << 16 |
         ((shared_address(tile) & 0x3ffff) >> 4);
}

// The descriptor of what lies `bytes` further.
__host__ __device__ constexpr uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// D (+)= A B, both in shared memory; `accumulate` false overwrites D.
__device__ __forceinline__ void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// The same with A in tensor memory.
__device__ __forceinline__ void multiply_tensor(uint32_t d, uint32_t a, uint64_t b, uint32_t shape, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n"
      "}" ::"r"(d),
      "r"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// Lanes of D that a product leaves as they are: bit i of word w is lane 32 * w + i.
struct LaneMask {
  uint32_t words[4];
};

// As `multiply_tensor`, in the lanes that are not `kept`.
__device__ __forceinline__ void multiply_tensor(uint32_t d, uint32_t a, uint64_t b, uint32_t shape, bool accumulate,
                                                const LaneMask& kept) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, {%5, %6, %7, %8}, p;\n"
      "}" ::"r"(d),
      "r"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate)), "r"(kept.words[0]), "r"(kept.words[1]),
      "r"(kept.words[2]), "r"(kept.words[3])
      : "memory");
}

// .ws, M = 64 or 128: what stays in the tensor core is B.
__device__ __forceinline__ void multiply_stationary(uint32_t d, uint64_t a, uint64_t b, uint32_t shape,
                                                    bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.ws.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// One arrival at `barrier` once all products that this thread issued are done. Stands for a fence_before_sync.
__device__ __forceinline__ void commit_products(Barrier& barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

}  // namespace vsa::ptx
