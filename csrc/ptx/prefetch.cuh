// A cache line on its way to L2: a hint, no access. PTX ISA 9.7.9.15.
#pragma once

namespace vsa::ptx {

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

}  // namespace vsa::ptx
