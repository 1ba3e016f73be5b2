// The Epilogue, four warps: dv and dk of an item from tensor memory to global memory, or zeros. Before that, K^T of the
// item from shared memory to tensor memory, as an operand of dq.
//
// dv^T and dk^T are [128 head dim, 64 keys] with a lane for each head-dim column. Neighbouring lanes exchange, so that
// a thread has two columns of every second key, and half a warp writes 64 bytes of a row.
#pragma once

#include "../../common/softmax.cuh"
#include "items.cuh"
#include "tensor_memory.cuh"

namespace vsa::sm100::bwd {

// `rows`: 64 rows of the output. Columns of the accumulator are keys.
template <int kKeys>
__device__ __forceinline__ void store_keys(__nv_bfloat16* rows, const float (&values)[kKeys], float scale, int first,
                                           int column) {
  const bool odd = column % 2 != 0;
  // The lower lane of a pair writes the even key, the upper lane the odd one.
  uint32_t* target = reinterpret_cast<uint32_t*>(rows + (first + (odd ? 1 : 0)) * kHeadDim + (column & ~1));
#pragma unroll
  for (int key = 0; key < kKeys; key += 2) {
    const uint32_t own = pack_pair<__nv_bfloat16>(values[key] * scale, values[key + 1] * scale);
    const uint32_t other = __shfl_xor_sync(ptx::kWholeWarp, own, 1);
    target[key * (kHeadDim / 2)] = odd ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
  }
}

__device__ __forceinline__ void store_zeros(__nv_bfloat16* rows, int thread) {
  uint4* target = reinterpret_cast<uint4*>(rows);
#pragma unroll
  for (int i = thread; i < kKeyBlockBytes / static_cast<int>(sizeof(uint4)); i += kWarpgroup) {
    target[i] = uint4{0, 0, 0, 0};
  }
}

// K^T [128 head dim, 64 keys]: a lane for each head-dim column, two keys a column of tensor memory. What is no key gets
// zeros, whatever K holds: 0 * NaN is NaN in dq = dS K.
template <typename Traits>
__device__ __forceinline__ void transpose_keys(typename Traits::Shared& shared, int size, int thread) {
  constexpr int kRowBytes = kBoxColumns * kElementBytes;
  const uint8_t* box = shared.sK + thread / kBoxColumns * kBoxBytes;
  const uint32_t in_row = thread % kBoxColumns * kElementBytes;
  uint32_t words[Traits::kKeyColumns];
#pragma unroll
  for (int word = 0; word < static_cast<int>(Traits::kKeyColumns); ++word) {
    uint32_t keys[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = 2 * word + i;
      const uint32_t swizzled = in_row ^ key % 8 * sizeof(uint4);
      keys[i] = *reinterpret_cast<const uint16_t*>(box + key * kRowBytes + swizzled);
      if (key >= size) keys[i] = 0;
    }
    words[word] = keys[0] | keys[1] << 16;
  }
  ptx::store_columns(ptx::tensor_address(shared.tensor_memory, thread / kWarp * kWarp, Traits::kKeyColumn), words);
  ptx::wait_stores();
}

template <typename Traits>
__device__ void write_gradients(const BackwardParams& params, typename Traits::Shared& shared, int thread) {
  constexpr int kKeys = 32;  // of a load: registers
  const int warp = thread / kWarp;
  ItemReader<Traits, true> items(shared);
  uint32_t parity = 0;
  Item item;
  while (items.next(item)) {
    const int64_t at = (int64_t{item.row} * params.Nkv + item.block) * (kBlock * kHeadDim);
    if (item.count == 0) {
      store_zeros(params.dk + at, thread);
      store_zeros(params.dv + at, thread);
      continue;
    }
    ptx::wait(shared.full_k, parity);
    // The last dq of the item before has read its K^T.
    ptx::wait(shared.empty_key_operand, parity ^ 1);
    ptx::fence_after_sync();
    __syncwarp();
    transpose_keys<Traits>(shared, item.size, thread);
    ptx::fence_before_sync();
    ptx::fence_async_shared();  // these reads come before the copy of the next K
    ptx::arrive_warp(shared.empty_k);
    ptx::arrive_warp(shared.full_key_operand);

    ptx::wait(shared.full_accumulators, parity);
    ptx::fence_after_sync();
    __syncwarp();
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const bool is_dk = part >= 2;
      const int first = part % 2 * kKeys;
      float values[kKeys];
      read_columns(values, shared.tensor_memory + (is_dk ? Traits::kDkColumn : Traits::kDvColumn) + first, warp);
      if (part == 3) {
        ptx::fence_before_sync();
        ptx::arrive_warp(shared.empty_accumulators);
      }
      store_keys((is_dk ? params.dk : params.dv) + at, values, is_dk ? params.sm_scale : 1.0f, first, thread);
    }
    parity ^= 1;
  }
}

}  // namespace vsa::sm100::bwd
