// Tensors of torch's stable ABI as the launchers need them: refused in words, copied where a kernel could not read
// them.
//
// What a refusal says: the argument as in the schema, what was given, what is allowed (`refuse` in checks.h). Nothing
// is launched before every argument has been looked at.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <utility>

#include "../params.h"
#include "tensor_map.h"

namespace vsa {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// bf16 or fp16. Refuses any other dtype of `x`.
Dtype operand_dtype(const char* name, const Tensor& x);

// Refuses `x` unless it has this dtype and this shape.
void expect(const char* name, const Tensor& x, ScalarType dtype, std::initializer_list<int64_t> shape);

// `expect`, of a tensor that is written: contiguous, at a multiple of 16 bytes.
void expect_output(const char* name, const Tensor& x, ScalarType dtype, std::initializer_list<int64_t> shape);

// Refuses tensors that are not on one CUDA device, that of the first; returns it. Absent ones are passed over. Looked
// at after dtypes and shapes, so that every other refusal can be tested on a machine without a GPU.
struct Named {
  const char* name;
  const Tensor* x;
};
int32_t common_device(std::initializer_list<Named> tensors);

// `x`, or a copy where it is not contiguous or begins between multiples of 16 bytes.
Tensor dense(const Tensor& x);

// [B, H, S, D] as bulk tensor copies can read it: `x` or, where its strides or its address are in the way, a copy. The
// caller keeps it alive until the kernel is launched (the allocator orders what follows on the same stream).
Tensor tma_readable(const Tensor& x);

// The same, and its map.
struct Operand {
  Tensor tensor;
  CUtensorMap map;
};
Operand block_operand(const Tensor& x, Dtype dtype);

// A contiguous tensor of garbage on the device of `like`.
Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype);

// `bytes` of scratch, 256-byte aligned, or nothing.
std::optional<Tensor> scratch(const Tensor& like, int64_t bytes);

// Refuses a scale that is not a number, or infinite in fp32.
void expect_scale(double sm_scale);

// Kernels assume a scale above 0: q and a scale with the same products.
std::pair<Tensor, double> positively_scaled(const Tensor& q, double sm_scale);

// The current stream of torch for a CUDA device.
cudaStream_t current_stream(int32_t device);

template <typename T>
T* pointer(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

}  // namespace vsa
