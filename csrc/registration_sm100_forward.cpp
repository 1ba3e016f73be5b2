// vsa::attention_sm100 for torch, as csrc/registration.cpp has vsa::attention_sm90. Emulated, not yet run on silicon.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <tuple>

#include "checks.h"
#include "common/operands.h"
#include "common/problem.h"
#include "sm100/fwd/launch.h"

namespace vsa {
namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int64_t kHeadDim = 128;

struct ForwardInputs {
  const Tensor &q, &k, &v, &kv_indices, &kv_num_blocks, &kv_block_sizes;
  double sm_scale;
  int64_t block_size;
};

Problem checked_forward(const ForwardInputs& in) {
  const Problem p =
      checked_problem(in.q, in.k, in.v, in.kv_indices, in.kv_num_blocks, in.kv_block_sizes, in.block_size);
  if (p.D != kHeadDim) refuse("q.shape[3]", text(p.D), text(kHeadDim));
  expect_scale(in.sm_scale);
  return p;
}

int32_t forward_device(const ForwardInputs& in, const Tensor& out, const Tensor& lse_log2) {
  return common_device({{"q", &in.q},
                        {"k", &in.k},
                        {"v", &in.v},
                        {"kv_indices", &in.kv_indices},
                        {"kv_num_blocks", &in.kv_num_blocks},
                        {"kv_block_sizes", &in.kv_block_sizes},
                        {"out", &out},
                        {"lse_log2", &lse_log2}});
}

// Arguments are checked and `guarded` is the current device.
void run_forward(const Problem& p, int32_t guarded, const ForwardInputs& in, Tensor& out, Tensor& lse_log2) {
  if (p.B * p.Hq * p.Nq == 0) return;
  const bool wants_lse = lse_log2.numel() != 0;
  if (p.Nkv * p.M == 0) {
    torch::stable::zero_(out);
    if (wants_lse) torch::stable::fill_(lse_log2, -std::numeric_limits<double>::infinity());
    return;
  }
  const auto [scaled_q, scale] = positively_scaled(in.q, in.sm_scale);
  const Operand q = block_operand(scaled_q, p.dtype);
  const Operand k = block_operand(in.k, p.dtype);
  const Operand v = block_operand(in.v, p.dtype);
  const Tensor indices = dense(in.kv_indices), counts = dense(in.kv_num_blocks), sizes = dense(in.kv_block_sizes);
  sm100::ForwardParams params{};
  params.q = q.map;
  params.k = k.map;
  params.v = v.map;
  params.out = out.data_ptr();
  params.lse_log2 = wants_lse ? pointer<float>(lse_log2) : nullptr;
  params.kv_indices = pointer<const int>(indices);
  params.kv_num_blocks = pointer<const int>(counts);
  params.kv_block_sizes = pointer<const int>(sizes);
  fill_sizes(params, p);
  params.sm_scale_log2 = static_cast<float>(scale * kLog2E);
  sm100::launch_forward(params, p.dtype, static_cast<int>(p.D), p.block_size, current_stream(guarded));
}

void attention_sm100_out(const Tensor q, const Tensor k, const Tensor v, const Tensor kv_indices,
                         const Tensor kv_num_blocks, const Tensor kv_block_sizes, double sm_scale, int64_t block_size,
                         bool return_lse, bool /*deterministic: every forward is*/, Tensor out, Tensor lse_log2) {
  const ForwardInputs in{q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size};
  const Problem p = checked_forward(in);
  expect_output("out", out, p.scalar_type, {p.B, p.Hq, p.Sq, p.D});
  if (return_lse) expect_output("lse_log2", lse_log2, ScalarType::Float, {p.B, p.Hq, p.Sq});
  if (!return_lse) expect_output("lse_log2", lse_log2, ScalarType::Float, {0});
  const int32_t device = forward_device(in, out, lse_log2);
  const DeviceGuard guard(device);
  run_forward(p, device, in, out, lse_log2);
}

std::tuple<Tensor, Tensor> attention_sm100(const Tensor q, const Tensor k, const Tensor v, const Tensor kv_indices,
                                           const Tensor kv_num_blocks, const Tensor kv_block_sizes, double sm_scale,
                                           int64_t block_size, bool return_lse, bool /*deterministic*/) {
  const ForwardInputs in{q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, block_size};
  const Problem p = checked_forward(in);
  const int32_t device = forward_device(in, q, q);
  const DeviceGuard guard(device);
  Tensor out = empty(q, {p.B, p.Hq, p.Sq, p.D}, p.scalar_type);
  Tensor lse_log2 = return_lse ? empty(q, {p.B, p.Hq, p.Sq}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  run_forward(p, device, in, out, lse_log2);
  return {out, lse_log2};
}

}  // namespace
}  // namespace vsa

STABLE_TORCH_LIBRARY_IMPL(vsa, CUDA, m) {
  m.impl("attention_sm100", TORCH_BOX(&vsa::attention_sm100));
  m.impl("attention_sm100.out", TORCH_BOX(&vsa::attention_sm100_out));
}
