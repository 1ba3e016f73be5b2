// 8x8 matrices of 16-bit elements between shared memory and the registers of a warp. PTX ISA 9.7.14.5.
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace vsa::ptx {

// Four matrices; lanes 8i..8i+7 give the 16-byte rows of matrix i, register i holds it.
__device__ __forceinline__ void load_matrices(uint32_t (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// The other way.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&registers)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
               : "memory");
}

}  // namespace vsa::ptx
