// The operators of backend sm100 that need no tcgen05: what eager does before and after the native backward, and the
// order of its work. Schemas and fakes are in vsa_inductor/backends/sm100.py, which is also what decides where they
// run: the kernels are plain CUDA, built for sm_90a as well.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "registration_sm100.h"

#include "checks.h"
#include "common/problem.h"
#include "sm100/order.h"
#include "sm100/postprocess.h"
#include "sm100/prepare.h"

namespace vsa {
namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int64_t kHeadDim = 128;
constexpr int64_t kBlock = sm100::kWorkBlock;

void expect_rank(const char* name, const Tensor& x, int64_t rank) {
  if (x.dim() != rank) refuse(name, text(x.dim(), " dimensions"), text(rank, " dimensions"));
}

// Refuses rows [B, H, S, D] that the kernels of this file have no instance for.
void expect_rows(const char* name, const Tensor& x, ScalarType dtype) {
  expect_rank(name, x, 4);
  const auto sizes = x.sizes();
  expect(name, x, dtype, {sizes[0], sizes[1], sizes[2], sizes[3]});
  const std::string at = text(name, ".shape");
  if (sizes[3] != kHeadDim) refuse((at + "[3]").c_str(), text(sizes[3]), text(kHeadDim));
  if (sizes[2] % kBlock != 0) refuse((at + "[2]").c_str(), text(sizes[2]), text("a multiple of ", kBlock));
  expect_int((at + "[2] * " + at + "[3]").c_str(), sizes[2] * sizes[3]);
  expect_int((at + "[0] * " + at + "[1] * blocks").c_str(), sizes[0] * sizes[1] * (sizes[2] / kBlock));
}

}  // namespace

namespace sm100 {

void expect_prepared(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& out) {
  expect_rows("q", q, ScalarType::BFloat16);
  const int64_t B = q.size(0), H = q.size(1), S = q.size(2);
  expect("dout", dout, ScalarType::BFloat16, {B, H, S, kHeadDim});
  expect("out", out, ScalarType::BFloat16, {B, H, S, kHeadDim});
  if (dlse) expect("dlse", *dlse, ScalarType::Float, {B, H, S});
}

std::tuple<Tensor, Tensor, Tensor> prepared(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q,
                                            const Tensor& out, cudaStream_t stream) {
  const int64_t B = q.size(0), H = q.size(1), S = q.size(2);
  Tensor dout_transposed = empty(q, {H * kHeadDim, B * S}, ScalarType::BFloat16);
  Tensor q_transposed = empty(q, {H * kHeadDim, B * S}, ScalarType::BFloat16);
  Tensor delta = empty(q, {B, H, S}, ScalarType::Float);
  // Rows are read 16 bytes at a time: what tensor copies can read, they can.
  const Tensor q_rows = tma_readable(q), dout_rows = tma_readable(dout), out_rows = tma_readable(out);
  std::optional<Tensor> dense_dlse;
  if (dlse) dense_dlse = dense(*dlse);
  TransposeParams params{};
  params.q = pointer<const __nv_bfloat16>(q_rows);
  params.dout = pointer<const __nv_bfloat16>(dout_rows);
  params.out = pointer<const __nv_bfloat16>(out_rows);
  std::copy_n(q_rows.strides().data(), 3, params.q_strides);
  std::copy_n(dout_rows.strides().data(), 3, params.dout_strides);
  std::copy_n(out_rows.strides().data(), 3, params.out_strides);
  params.dlse = dense_dlse ? pointer<const float>(*dense_dlse) : nullptr;
  params.q_transposed = pointer<__nv_bfloat16>(q_transposed);
  params.dout_transposed = pointer<__nv_bfloat16>(dout_transposed);
  params.delta = pointer<float>(delta);
  params.B = static_cast<int>(B);
  params.H = static_cast<int>(H);
  params.Nq = static_cast<int>(S / kBlock);
  launch_transpose(params, stream);
  return {dout_transposed, q_transposed, delta};
}

Tensor finished(const Tensor& dq_accum, double sm_scale, cudaStream_t stream) {
  const int64_t B = dq_accum.size(0), H = dq_accum.size(1), S = dq_accum.size(2);
  Tensor dq = empty(dq_accum, {B, H, S, kHeadDim}, ScalarType::BFloat16);
  const Tensor accumulator = dense(dq_accum);
  PostprocessParams params{};
  params.dq_accum = pointer<const float>(accumulator);
  params.dq = pointer<__nv_bfloat16>(dq);
  params.rows = static_cast<int>(B * H);
  params.Nq = static_cast<int>(S / kBlock);
  params.sm_scale = static_cast<float>(sm_scale);
  launch_postprocess(params, stream);
  return dq;
}

}  // namespace sm100

namespace {

std::tuple<Tensor, Tensor, Tensor> prepare_backward(const Tensor dout, const std::optional<Tensor> dlse, const Tensor q,
                                                    const Tensor out) {
  sm100::expect_prepared(dout, dlse, q, out);
  const int32_t device = common_device({{"q", &q}, {"dout", &dout}, {"out", &out}, {"dlse", dlse ? &*dlse : nullptr}});
  const DeviceGuard guard(device);
  return sm100::prepared(dout, dlse, q, out, current_stream(device));
}

Tensor finish_dq(const Tensor dq_accum, double sm_scale) {
  expect_rows("dq_accum", dq_accum, ScalarType::Float);
  expect_scale(sm_scale);
  const int32_t device = common_device({{"dq_accum", &dq_accum}});
  const DeviceGuard guard(device);
  return sm100::finished(dq_accum, sm_scale, current_stream(device));
}

Tensor work_order(const Tensor q_offsets, int64_t num_q_blocks, int64_t bin_width, bool snake) {
  expect_rank("q_offsets", q_offsets, 3);
  const int64_t rows = q_offsets.size(0) * q_offsets.size(1), blocks = q_offsets.size(2) - 1;
  expect("q_offsets", q_offsets, ScalarType::Int, {q_offsets.size(0), q_offsets.size(1), blocks + 1});
  if (blocks < 0) refuse("q_offsets.shape[2]", "0", "the number of kv blocks and 1");
  if (num_q_blocks < 0) refuse("num_q_blocks", text(num_q_blocks), "0 or more");
  if (bin_width < 1) refuse("bin_width", text(bin_width), "1 or more");
  expect_int("num_q_blocks", num_q_blocks);
  expect_int("bin_width", bin_width);
  expect_int("q_offsets.shape[0] * q_offsets.shape[1] * blocks", rows * blocks);
  // The refusals of lengths: before the device is touched.
  sm100::plan_work(blocks, 0, 0, false, {/*ordered_blocks=*/0});
  const int32_t device = common_device({{"q_offsets", &q_offsets}});
  const DeviceGuard guard(device);
  Tensor order = empty(q_offsets, {rows * blocks}, ScalarType::Int);
  const Tensor offsets = dense(q_offsets);
  sm100::OrderParams params{};
  params.q_offsets = pointer<const int>(offsets);
  params.order = pointer<int>(order);
  params.rows = static_cast<int>(rows);
  params.Nq = static_cast<int>(num_q_blocks);
  params.Nkv = static_cast<int>(blocks);
  params.bin_width = static_cast<int>(bin_width);
  params.snake = snake;
  sm100::launch_order(params, current_stream(device));
  return order;
}

}  // namespace
}  // namespace vsa

STABLE_TORCH_LIBRARY_IMPL(vsa, CUDA, m) {
  m.impl("prepare_backward_sm100", TORCH_BOX(&vsa::prepare_backward));
  m.impl("finish_dq_sm100", TORCH_BOX(&vsa::finish_dq));
  m.impl("work_order_sm100", TORCH_BOX(&vsa::work_order));
}
