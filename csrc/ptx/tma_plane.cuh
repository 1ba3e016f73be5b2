// Tensor copies by the copy engine from matrices: maps of two dimensions. PTX ISA 9.7.9.27.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mbarrier.cuh"

namespace vsa::ptx {

// Copies the box at coordinates (innermost first) of a 2-D map to `target`; `barrier` is told the bytes of the box.
__device__ __forceinline__ void load_plane(void* target, const CUtensorMap& map, Barrier& barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(shared_address(target)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1)
      : "memory");
}

}  // namespace vsa::ptx
