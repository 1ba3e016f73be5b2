// One lane for the whole warp. PTX ISA 9.7.13.13.
#pragma once

#include <cstdint>

namespace vsa::ptx {

constexpr uint32_t kWholeWarp = 0xffffffffu;

// True in one lane. For a converged warp; the compiler then knows that the branch is taken by a single thread.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}

}  // namespace vsa::ptx
