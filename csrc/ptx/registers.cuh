// How many registers the threads of a warpgroup own. Executed by all its warps; takes effect only in a kernel whose
// register count is capped (__launch_bounds__(threads, 1)). PTX ISA 9.7.19.5.
#pragma once

namespace vsa::ptx {

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace vsa::ptx
