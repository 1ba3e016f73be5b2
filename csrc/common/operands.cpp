#include "operands.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "../checks.h"

namespace vsa {
namespace {

constexpr int kRank = 4;
// Bulk copies and vector stores: what addresses are multiples of (PTX ISA, cp.async.bulk).
constexpr uintptr_t kAlignment = 16;

bool aligned(const Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % kAlignment == 0; }

template <typename Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string words = "(";
  for (auto size : sizes) words += text(words.size() > 1 ? ", " : "", size);
  return words + ")";
}

std::string device_text(const Tensor& x) {
  return x.is_cuda() ? text("cuda:", x.get_device_index()) : std::string("a device that is not CUDA");
}

Tensor4 described(const Tensor& x) {
  Tensor4 described{x.data_ptr(), {}, {}};
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  for (int axis = 0; axis < kRank; ++axis) {
    described.sizes[axis] = sizes[axis];
    described.strides[axis] = strides[axis];
  }
  return described;
}

Tensor called(const char* name, const Tensor& x) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(x)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor empty_of(const Tensor& like, const int64_t* shape, size_t rank, ScalarType dtype) {
  std::array<int64_t, kRank> strides{};
  int64_t stride = 1;
  for (size_t axis = rank; axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis] > 1 ? shape[axis] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(rank), shape, strides.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                               aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
  return Tensor(handle);
}

// Not contiguous(x), which leaves a dense tensor at an odd address where it is.
Tensor copied(const Tensor& x) {
  const auto sizes = x.sizes();
  Tensor copy = empty_of(x, sizes.data(), sizes.size(), x.scalar_type());
  torch::stable::copy_(copy, x);
  return copy;
}

}  // namespace

Dtype operand_dtype(const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      refuse(name, torch::headeronly::toString(x.scalar_type()), "BFloat16 or Half");
  }
}

void expect(const char* name, const Tensor& x, ScalarType dtype, std::initializer_list<int64_t> shape) {
  if (x.scalar_type() != dtype) {
    refuse(name, torch::headeronly::toString(x.scalar_type()), torch::headeronly::toString(dtype));
  }
  const auto sizes = x.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    refuse(name, text("shape ", shape_text(sizes)), shape_text(shape));
  }
}

void expect_output(const char* name, const Tensor& x, ScalarType dtype, std::initializer_list<int64_t> shape) {
  expect(name, x, dtype, shape);
  if (!x.is_contiguous()) refuse(name, text("strides ", shape_text(x.strides())), "a contiguous tensor");
  if (!aligned(x)) refuse(name, "an address between multiples of 16 bytes", "a multiple of 16 bytes");
}

int32_t common_device(std::initializer_list<Named> tensors) {
  const Named first = *tensors.begin();
  if (!first.x->is_cuda()) refuse(first.name, "a tensor that is not on a CUDA device", "CUDA tensors");
  const int32_t device = first.x->get_device_index();
  for (const Named& tensor : tensors) {
    if (tensor.x == nullptr || (tensor.x->is_cuda() && tensor.x->get_device_index() == device)) continue;
    refuse(tensor.name, device_text(*tensor.x), text("cuda:", device, ", the device of ", first.name));
  }
  return device;
}

Tensor dense(const Tensor& x) {
  if (x.is_contiguous() && aligned(x)) return x;
  return copied(x);
}

Tensor tma_readable(const Tensor& x) { return tma_ready(described(x)) ? x : copied(x); }

Operand block_operand(const Tensor& x, Dtype dtype) {
  const Tensor readable = tma_readable(x);
  return {readable, block_map(described(readable), dtype)};
}

Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return empty_of(like, shape.begin(), shape.size(), dtype);
}

std::optional<Tensor> scratch(const Tensor& like, int64_t bytes) {
  if (bytes == 0) return std::nullopt;
  // The caching allocator hands out blocks at multiples of 512 bytes.
  return empty(like, {bytes}, ScalarType::Byte);
}

void expect_scale(double sm_scale) {
  if (!std::isfinite(sm_scale)) refuse("sm_scale", text(sm_scale), "a finite number");
  // Kernels take it times log2(e), in fp32.
  if (std::fabs(sm_scale) > std::numeric_limits<float>::max() / 2) {
    refuse("sm_scale", text(sm_scale), "a number that is finite in fp32");
  }
}

std::pair<Tensor, double> positively_scaled(const Tensor& q, double sm_scale) {
  // A smaller one is 0 to the kernels, which flush: 0 * -inf would be NaN.
  if (std::fabs(sm_scale) < std::numeric_limits<float>::min()) return {torch::stable::new_zeros(q, q.sizes()), 1.0};
  // (-q) * |scale|, as (0 * q) * 1 above: rare, so one more launch is no matter.
  if (sm_scale < 0) return {called("aten::neg", q), -sm_scale};
  return {q, sm_scale};
}

cudaStream_t current_stream(int32_t device) {
  using Lookup = AOTITorchError (*)(int32_t, void**);
  // Only libtorch_cuda has it, and a library that names it does not load where torch has no CUDA.
  static const Lookup lookup = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = torch_cuda == nullptr ? nullptr : dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream");
    if (symbol == nullptr) fail("this torch was built without CUDA: it has no current stream");
    return reinterpret_cast<Lookup>(symbol);
  }();
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(lookup(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace vsa
