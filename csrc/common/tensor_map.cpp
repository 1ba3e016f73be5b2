#include "tensor_map.h"

#include <cuda_runtime.h>

#include "../checks.h"

namespace vsa {
namespace {

constexpr int64_t kElementBytes = 2;
// PTX ISA 5.5.2, CUDA driver API "cuTensorMapEncodeTiled": what base addresses and strides are multiples of.
constexpr int64_t kAlignment = 16;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Asked of the runtime, which opens the driver on first use: the library does not link libcuda, and loads without one.
Encode encode_tiled() {
  static const Encode found = [] {
    constexpr unsigned kSince = 12000;  // the CUDA version whose ABI of the function we know
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    VSA_CHECK_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) fail("cuTensorMapEncodeTiled: this CUDA driver does not have it");
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

// The map of `rank` dimensions, innermost first, strides in bytes. 128-byte swizzle.
CUtensorMap encoded(void* data, Dtype dtype, int rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                    const cuuint32_t* box) {
  const cuuint32_t element_strides[] = {1, 1, 1, 1};
  const auto type = dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  const auto encode = [&] {
    return encode_tiled()(&map, type, static_cast<cuuint32_t>(rank), data, sizes, strides, box, element_strides,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not used the runtime yet: a launch gives it a context by itself, the driver does not.
    int device = 0;
    VSA_CHECK_CUDA(cudaGetDevice(&device));
    VSA_CHECK_CUDA(cudaSetDevice(device));
    result = encode();
  }
  if (result != CUDA_SUCCESS) {
    std::string words = text("cuTensorMapEncodeTiled: error ", static_cast<int>(result), " for sizes {");
    for (int axis = 0; axis < rank; ++axis) words += text(axis == 0 ? "" : ", ", sizes[axis]);
    words += "} and strides {";
    for (int axis = 0; axis < rank - 1; ++axis) words += text(axis == 0 ? "" : ", ", strides[axis]);
    fail(words + "} bytes");
  }
  return map;
}

}  // namespace

bool tma_ready(const Tensor4& x) {
  if (reinterpret_cast<uintptr_t>(x.data) % kAlignment != 0) return false;
  if (x.strides[3] != 1 && x.sizes[3] != 1) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (x.sizes[axis] == 1) continue;
    if (x.strides[axis] == 0 || x.strides[axis] * kElementBytes % kAlignment != 0) return false;
  }
  return true;
}

CUtensorMap block_map(const Tensor4& x, Dtype dtype) {
  constexpr int kRank = 4;
  cuuint64_t sizes[kRank];
  cuuint64_t strides[kRank - 1];
  for (int axis = 0; axis < kRank; ++axis) sizes[axis] = static_cast<cuuint64_t>(x.sizes[kRank - 1 - axis]);
  for (int axis = 0; axis < kRank - 1; ++axis) {
    const int64_t stride = x.strides[kRank - 2 - axis] * kElementBytes;
    // Never multiplied by anything but 0 where the size is 1, but it has to be a legal one.
    strides[axis] = sizes[axis + 1] == 1 ? sizes[0] * kElementBytes : static_cast<cuuint64_t>(stride);
  }
  const cuuint32_t box[kRank] = {kBoxColumns, kBoxRows, 1, 1};
  return encoded(x.data, dtype, kRank, sizes, strides, box);
}

CUtensorMap matrix_map(void* data, int64_t rows, int64_t columns, int box_rows, Dtype dtype) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns * kElementBytes)};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  return encoded(data, dtype, 2, sizes, strides, box);
}

}  // namespace vsa
