// Tensor memory from and to registers, by whole warps. PTX ISA 9.7.16.2.3, 9.7.16.8.
//
// Register r of thread l holds the cell, relative to the address,
//   32x32b     lane l, column r
//   16x256b    lane l / 4 + 8 * (r / 2 % 2), column r % 2 + 2 * (l % 4) + 8 * (r / 4): a fragment as of wgmma
//   (wgmma.cuh)
// A warp's address must lie in its own 32 lanes (tcgen05_alloc.cuh), for 16x256b in either half of them.
#pragma once

#include <cstdint>

namespace vsa::ptx {

// What loads have in registers may be used after this, passed through `await_loads`.
__device__ __forceinline__ void wait_loads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// Until what this thread stored has been written.
__device__ __forceinline__ void wait_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// Keeps the compiler, which takes a load for finished when it is issued, from moving uses of `values` to before the
// wait.
template <int kCount>
__device__ __forceinline__ void hold_loaded(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Waits for all loads of this thread; `values` may be used afterwards, those of others once `hold_loaded` had them.
template <int kCount>
__device__ __forceinline__ void await_loads(float (&values)[kCount]) {
  wait_loads();
  hold_loaded(values);
}

// 32x32b: a lane's columns, one after the other.
__device__ __forceinline__ void load_columns(float (&values)[8], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]), "=f"(values[4]), "=f"(values[5]),
                 "=f"(values[6]), "=f"(values[7])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_columns(float (&values)[16], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, [%16];"
      : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]), "=f"(values[4]), "=f"(values[5]),
        "=f"(values[6]), "=f"(values[7]), "=f"(values[8]), "=f"(values[9]), "=f"(values[10]), "=f"(values[11]),
        "=f"(values[12]), "=f"(values[13]), "=f"(values[14]), "=f"(values[15])
      : "r"(address)
      : "memory");
}
__device__ __forceinline__ void load_columns(float (&values)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "[%32];"
      : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]), "=f"(values[4]), "=f"(values[5]),
        "=f"(values[6]), "=f"(values[7]), "=f"(values[8]), "=f"(values[9]), "=f"(values[10]), "=f"(values[11]),
        "=f"(values[12]), "=f"(values[13]), "=f"(values[14]), "=f"(values[15]), "=f"(values[16]), "=f"(values[17]),
        "=f"(values[18]), "=f"(values[19]), "=f"(values[20]), "=f"(values[21]), "=f"(values[22]), "=f"(values[23]),
        "=f"(values[24]), "=f"(values[25]), "=f"(values[26]), "=f"(values[27]), "=f"(values[28]), "=f"(values[29]),
        "=f"(values[30]), "=f"(values[31])
      : "r"(address)
      : "memory");
}
__device__ __forceinline__ void store_columns(uint32_t address, const uint32_t (&values)[8]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(address),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(values[4]), "r"(values[5]),
               "r"(values[6]), "r"(values[7])
               : "memory");
}
__device__ __forceinline__ void store_columns(uint32_t address, const uint32_t (&values)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16};" ::"r"(address),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(values[4]), "r"(values[5]), "r"(values[6]),
      "r"(values[7]), "r"(values[8]), "r"(values[9]), "r"(values[10]), "r"(values[11]), "r"(values[12]),
      "r"(values[13]), "r"(values[14]), "r"(values[15])
      : "memory");
}
__device__ __forceinline__ void store_columns(uint32_t address, const uint32_t (&values)[32]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31, %32};" ::"r"(address),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(values[4]), "r"(values[5]), "r"(values[6]),
      "r"(values[7]), "r"(values[8]), "r"(values[9]), "r"(values[10]), "r"(values[11]), "r"(values[12]),
      "r"(values[13]), "r"(values[14]), "r"(values[15]), "r"(values[16]), "r"(values[17]), "r"(values[18]),
      "r"(values[19]), "r"(values[20]), "r"(values[21]), "r"(values[22]), "r"(values[23]), "r"(values[24]),
      "r"(values[25]), "r"(values[26]), "r"(values[27]), "r"(values[28]), "r"(values[29]), "r"(values[30]),
      "r"(values[31])
      : "memory");
}

template <int kCount>
__device__ __forceinline__ void store_columns(uint32_t address, const float (&values)[kCount]) {
  uint32_t words[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = __float_as_uint(values[i]);
  store_columns(address, words);
}

// 16x256b: fragments of 16 lanes by 8 columns for each 4 values.
__device__ __forceinline__ void load_fragments(float (&values)[8], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]), "=f"(values[4]), "=f"(values[5]),
                 "=f"(values[6]), "=f"(values[7])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_fragments(float (&values)[16], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, [%16];"
      : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]), "=f"(values[4]), "=f"(values[5]),
        "=f"(values[6]), "=f"(values[7]), "=f"(values[8]), "=f"(values[9]), "=f"(values[10]), "=f"(values[11]),
        "=f"(values[12]), "=f"(values[13]), "=f"(values[14]), "=f"(values[15])
      : "r"(address)
      : "memory");
}
__device__ __forceinline__ void load_fragments(float (&values)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "[%32];"
      : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]), "=f"(values[4]), "=f"(values[5]),
        "=f"(values[6]), "=f"(values[7]), "=f"(values[8]), "=f"(values[9]), "=f"(values[10]), "=f"(values[11]),
        "=f"(values[12]), "=f"(values[13]), "=f"(values[14]), "=f"(values[15]), "=f"(values[16]), "=f"(values[17]),
        "=f"(values[18]), "=f"(values[19]), "=f"(values[20]), "=f"(values[21]), "=f"(values[22]), "=f"(values[23]),
        "=f"(values[24]), "=f"(values[25]), "=f"(values[26]), "=f"(values[27]), "=f"(values[28]), "=f"(values[29]),
        "=f"(values[30]), "=f"(values[31])
      : "r"(address)
      : "memory");
}
__device__ __forceinline__ void store_fragments(uint32_t address, const uint32_t (&values)[8]) {
  asm volatile("tcgen05.st.sync.aligned.16x256b.x2.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(address),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(values[4]), "r"(values[5]),
               "r"(values[6]), "r"(values[7])
               : "memory");
}
__device__ __forceinline__ void store_fragments(uint32_t address, const uint32_t (&values)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.16x256b.x4.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16};" ::"r"(address),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(values[4]), "r"(values[5]), "r"(values[6]),
      "r"(values[7]), "r"(values[8]), "r"(values[9]), "r"(values[10]), "r"(values[11]), "r"(values[12]),
      "r"(values[13]), "r"(values[14]), "r"(values[15])
      : "memory");
}
__device__ __forceinline__ void store_fragments(uint32_t address, const uint32_t (&values)[32]) {
  asm volatile(
      "tcgen05.st.sync.aligned.16x256b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31, %32};" ::"r"(address),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "r"(values[4]), "r"(values[5]), "r"(values[6]),
      "r"(values[7]), "r"(values[8]), "r"(values[9]), "r"(values[10]), "r"(values[11]), "r"(values[12]),
      "r"(values[13]), "r"(values[14]), "r"(values[15]), "r"(values[16]), "r"(values[17]), "r"(values[18]),
      "r"(values[19]), "r"(values[20]), "r"(values[21]), "r"(values[22]), "r"(values[23]), "r"(values[24]),
      "r"(values[25]), "r"(values[26]), "r"(values[27]), "r"(values[28]), "r"(values[29]), "r"(values[30]),
      "r"(values[31])
      : "memory");
}

}  // namespace vsa::ptx
