// Tensor copies by the copy engine. PTX ISA 9.7.9.27.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mbarrier.cuh"

namespace vsa::ptx {

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at coordinates (innermost first) of a 4-D map to `target`; `barrier` is told the bytes of the box.
__device__ __forceinline__ void load_box(void* target, const CUtensorMap& map, Barrier& barrier, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace vsa::ptx
