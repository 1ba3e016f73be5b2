// vsa::attention_sm90, vsa::attention_backward_sm90 and vsa::attention_backward_sm90_eager for torch, through its
// stable ABI. Schemas, tags and fakes are in vsa_inductor/ops/attention.py and attention_backward.py: here are
// implementations for the CUDA dispatch key only.
//
// The functional forms allocate exactly what the fakes promise; the .out forms fill what they are given. Both look at
// every argument, copy what a kernel could not read, and launch on torch's current stream without waiting for anything.
// Letters are those of params.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "checks.h"
#include "common/operands.h"
#include "common/problem.h"
#include "params.h"
#include "sm90/bwd/around.h"
#include "sm90/bwd/launch.h"
#include "sm90/fwd/launch.h"

namespace vsa {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Arguments are checked and `guarded` is the current device.
void run_forward(const Problem& p, int32_t guarded, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& kv_indices, const Tensor& kv_num_blocks, const Tensor& kv_block_sizes, double sm_scale,
                 Tensor& out, Tensor& lse_log2) {
  if (p.B * p.Hq * p.Nq == 0) return;
  const bool wants_lse = lse_log2.numel() != 0;
  if (p.Nkv * p.M == 0) {
    torch::stable::zero_(out);
    if (wants_lse) torch::stable::fill_(lse_log2, -std::numeric_limits<double>::infinity());
    return;
  }
  const auto [scaled_q, scale] = positively_scaled(q, sm_scale);
  const Tensor q_rows = tma_readable(scaled_q);
  const Operand k_blocks = block_operand(k, p.dtype);
  const Operand v_blocks = block_operand(v, p.dtype);
  const Tensor indices = dense(kv_indices), counts = dense(kv_num_blocks), sizes = dense(kv_block_sizes);
  AttentionForwardParams params{};
  params.q = q_rows.data_ptr();
  std::copy_n(q_rows.strides().data(), 3, params.q_strides);
  params.k = k_blocks.map;
  params.v = v_blocks.map;
  params.out = out.data_ptr();
  params.lse_log2 = wants_lse ? pointer<float>(lse_log2) : nullptr;
  params.kv_indices = pointer<const int>(indices);
  params.kv_num_blocks = pointer<const int>(counts);
  params.kv_block_sizes = pointer<const int>(sizes);
  fill_sizes(params, p);
  params.sm_scale_log2 = static_cast<float>(scale * kLog2E);
  sm90::launch_forward(params, p.dtype, static_cast<int>(p.D), p.block_size, current_stream(guarded));
}

void attention_sm90_out(const Tensor q, const Tensor k, const Tensor v, const Tensor kv_indices,
                        const Tensor kv_num_blocks, const Tensor kv_block_sizes, double sm_scale, int64_t block_size,
                        bool return_lse, bool /*deterministic: every forward is*/, Tensor out, Tensor lse_log2) {
  const Problem p = checked_problem(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, block_size);
  expect_scale(sm_scale);
  expect_output("out", out, p.scalar_type, {p.B, p.Hq, p.Sq, p.D});
  if (return_lse) expect_output("lse_log2", lse_log2, ScalarType::Float, {p.B, p.Hq, p.Sq});
  if (!return_lse) expect_output("lse_log2", lse_log2, ScalarType::Float, {0});
  const int32_t device = common_device({{"q", &q},
                                        {"k", &k},
                                        {"v", &v},
                                        {"kv_indices", &kv_indices},
                                        {"kv_num_blocks", &kv_num_blocks},
                                        {"kv_block_sizes", &kv_block_sizes},
                                        {"out", &out},
                                        {"lse_log2", &lse_log2}});
  const DeviceGuard guard(device);
  run_forward(p, device, q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, out, lse_log2);
}

std::tuple<Tensor, Tensor> attention_sm90(const Tensor q, const Tensor k, const Tensor v, const Tensor kv_indices,
                                          const Tensor kv_num_blocks, const Tensor kv_block_sizes, double sm_scale,
                                          int64_t block_size, bool return_lse, bool /*deterministic*/) {
  const Problem p = checked_problem(q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, block_size);
  expect_scale(sm_scale);
  const int32_t device = common_device({{"q", &q},
                                        {"k", &k},
                                        {"v", &v},
                                        {"kv_indices", &kv_indices},
                                        {"kv_num_blocks", &kv_num_blocks},
                                        {"kv_block_sizes", &kv_block_sizes}});
  const DeviceGuard guard(device);
  Tensor out = empty(q, {p.B, p.Hq, p.Sq, p.D}, p.scalar_type);
  Tensor lse_log2 = return_lse ? empty(q, {p.B, p.Hq, p.Sq}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  run_forward(p, device, q, k, v, kv_indices, kv_num_blocks, kv_block_sizes, sm_scale, out, lse_log2);
  return {out, lse_log2};
}

// The inputs of the backward in the order of its schema, from dout to needs_dkv. `delta` is null where it is yet to be
// made.
struct BackwardInputs {
  const Tensor* dout;
  const Tensor &q, &k, &v, &lse_log2;
  const Tensor* delta;
  const Tensor &kv_indices, &kv_num_blocks;
  const std::optional<Tensor>&q_indices, &q_offsets;
  const Tensor& kv_block_sizes;
  double sm_scale;
  int64_t block_size;
  bool deterministic, needs_dq, needs_dkv;
};

Problem checked_backward(const BackwardInputs& in) {
  const Problem p =
      checked_problem(in.q, in.k, in.v, in.kv_indices, in.kv_num_blocks, in.kv_block_sizes, in.block_size);
  if (in.block_size != 64) refuse("block_size", text(in.block_size), "64");
  expect("dout", *in.dout, p.scalar_type, {p.B, p.Hq, p.Sq, p.D});
  expect("lse_log2", in.lse_log2, ScalarType::Float, {p.B, p.Hq, p.Sq});
  if (in.delta != nullptr) expect("delta", *in.delta, ScalarType::Float, {p.B, p.Hq, p.Sq});
  expect_scale(in.sm_scale);
  if (!in.needs_dkv) return p;
  if (!in.q_indices || !in.q_offsets) refuse("q_indices, q_offsets", "None", "the lists of vsa::transpose_blocks");
  expect("q_indices", *in.q_indices, ScalarType::Int, {p.B, p.Hq, p.Nq * p.M});
  expect("q_offsets", *in.q_offsets, ScalarType::Int, {p.B, p.Hq, p.Nkv + 1});
  return p;
}

int32_t device_of(const BackwardInputs& in) {
  return common_device({{"q", &in.q},
                        {"k", &in.k},
                        {"v", &in.v},
                        {"dout", in.dout},
                        {"lse_log2", &in.lse_log2},
                        {"delta", in.delta},
                        {"kv_indices", &in.kv_indices},
                        {"kv_num_blocks", &in.kv_num_blocks},
                        {"q_indices", in.needs_dkv ? &*in.q_indices : nullptr},
                        {"q_offsets", in.needs_dkv ? &*in.q_offsets : nullptr},
                        {"kv_block_sizes", &in.kv_block_sizes}});
}

void run_backward(const Problem& p, int32_t guarded, const BackwardInputs& in, Tensor& dq_accum, Tensor& dk,
                  Tensor& dv) {
  if (p.B * p.Hq * p.Nq * p.Nkv * p.M == 0) {
    for (Tensor* x : {&dq_accum, &dk, &dv}) torch::stable::zero_(*x);
    return;
  }
  const auto [scaled_q, scale] = positively_scaled(in.q, in.sm_scale);
  const Operand q_blocks = block_operand(scaled_q, p.dtype);
  const Operand k_blocks = block_operand(in.k, p.dtype);
  const Operand v_blocks = block_operand(in.v, p.dtype);
  const Operand dout_blocks = block_operand(*in.dout, p.dtype);
  const Tensor lse_log2 = dense(in.lse_log2), delta = dense(*in.delta);
  const Tensor indices = dense(in.kv_indices), counts = dense(in.kv_num_blocks), sizes = dense(in.kv_block_sizes);
  AttentionBackwardParams params{};
  params.q = q_blocks.map;
  params.k = k_blocks.map;
  params.v = v_blocks.map;
  params.dout = dout_blocks.map;
  params.lse_log2 = pointer<const float>(lse_log2);
  params.delta = pointer<const float>(delta);
  params.kv_indices = pointer<const int>(indices);
  params.kv_num_blocks = pointer<const int>(counts);
  params.kv_block_sizes = pointer<const int>(sizes);
  std::optional<Tensor> q_indices, q_offsets;
  if (in.needs_dkv) {
    q_indices = dense(*in.q_indices);
    q_offsets = dense(*in.q_offsets);
    params.q_indices = pointer<const int>(*q_indices);
    params.q_offsets = pointer<const int>(*q_offsets);
    params.dk = dk.data_ptr();
    params.dv = dv.data_ptr();
  }
  params.dq_accum = in.needs_dq ? pointer<float>(dq_accum) : nullptr;
  fill_sizes(params, p);
  params.sm_scale = static_cast<float>(scale);
  params.sm_scale_log2 = static_cast<float>(scale * kLog2E);
  params.deterministic = in.deterministic;
  const int head_dim = static_cast<int>(p.D);
  const auto workspace = scratch(in.q, sm90::backward_workspace_bytes(params, head_dim, p.block_size));
  params.workspace = workspace ? workspace->data_ptr() : nullptr;
  sm90::launch_backward(params, p.dtype, head_dim, p.block_size, current_stream(guarded));
}

void attention_backward_sm90_out(const Tensor dout, const Tensor q, const Tensor k, const Tensor v,
                                 const Tensor lse_log2, const Tensor delta, const Tensor kv_indices,
                                 const Tensor kv_num_blocks, const std::optional<Tensor> q_indices,
                                 const std::optional<Tensor> q_offsets, const Tensor kv_block_sizes, double sm_scale,
                                 int64_t block_size, bool deterministic, bool needs_dq, bool needs_dkv, Tensor dq_accum,
                                 Tensor dk, Tensor dv) {
  const BackwardInputs in{&dout,
                          q,
                          k,
                          v,
                          lse_log2,
                          &delta,
                          kv_indices,
                          kv_num_blocks,
                          q_indices,
                          q_offsets,
                          kv_block_sizes,
                          sm_scale,
                          block_size,
                          deterministic,
                          needs_dq,
                          needs_dkv};
  const Problem p = checked_backward(in);
  if (needs_dq) expect_output("dq_accum", dq_accum, ScalarType::Float, {p.B, p.Hq, p.Sq, p.D});
  if (!needs_dq) expect_output("dq_accum", dq_accum, ScalarType::Float, {0});
  for (const Named& x : {Named{"dk", &dk}, Named{"dv", &dv}}) {
    if (needs_dkv) expect_output(x.name, *x.x, p.scalar_type, {p.B, p.Hkv, p.Skv, p.D});
    if (!needs_dkv) expect_output(x.name, *x.x, p.scalar_type, {0});
  }
  const int32_t device = device_of(in);
  common_device({{"q", &q}, {"dq_accum", &dq_accum}, {"dk", &dk}, {"dv", &dv}});
  const DeviceGuard guard(device);
  run_backward(p, device, in, dq_accum, dk, dv);
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_sm90(
    const Tensor dout, const Tensor q, const Tensor k, const Tensor v, const Tensor lse_log2, const Tensor delta,
    const Tensor kv_indices, const Tensor kv_num_blocks, const std::optional<Tensor> q_indices,
    const std::optional<Tensor> q_offsets, const Tensor kv_block_sizes, double sm_scale, int64_t block_size,
    bool deterministic, bool needs_dq, bool needs_dkv) {
  const BackwardInputs in{&dout,
                          q,
                          k,
                          v,
                          lse_log2,
                          &delta,
                          kv_indices,
                          kv_num_blocks,
                          q_indices,
                          q_offsets,
                          kv_block_sizes,
                          sm_scale,
                          block_size,
                          deterministic,
                          needs_dq,
                          needs_dkv};
  const Problem p = checked_backward(in);
  const int32_t device = device_of(in);
  const DeviceGuard guard(device);
  Tensor dq_accum = needs_dq ? empty(q, {p.B, p.Hq, p.Sq, p.D}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  Tensor dk = needs_dkv ? empty(k, {p.B, p.Hkv, p.Skv, p.D}, p.scalar_type) : empty(k, {0}, p.scalar_type);
  Tensor dv = needs_dkv ? empty(v, {p.B, p.Hkv, p.Skv, p.D}, p.scalar_type) : empty(v, {0}, p.scalar_type);
  run_backward(p, device, in, dq_accum, dk, dv);
  return {dq_accum, dk, dv};
}

// rowsum(out * dout) - dlse / ln 2, [B, Hq, Sq] fp32. `dout` is tma_readable.
Tensor make_delta(const Problem& p, const Tensor& out, const Tensor& dout, const std::optional<Tensor>& dlse,
                  cudaStream_t stream) {
  Tensor delta = empty(out, {p.B, p.Hq, p.Sq}, ScalarType::Float);
  const Tensor dense_out = dense(out);
  sm90::DeltaParams params{};
  params.out = dense_out.data_ptr();
  params.dout = dout.data_ptr();
  std::copy_n(dout.strides().data(), 3, params.dout_strides);
  if (dlse) {
    params.dlse = pointer<const float>(*dlse);
    std::copy_n(dlse->strides().data(), 3, params.dlse_strides);
  }
  params.delta = pointer<float>(delta);
  params.B = static_cast<int>(p.B);
  params.H = static_cast<int>(p.Hq);
  params.S = static_cast<int>(p.Sq);
  sm90::launch_delta(params, p.dtype, static_cast<int>(p.D), stream);
  return delta;
}

// The whole backward but for the transposition of the lists: what eager runs, in one trip from Python.
std::tuple<Tensor, Tensor, Tensor> attention_backward_sm90_eager(
    const Tensor dout, const std::optional<Tensor> dlse, const Tensor q, const Tensor k, const Tensor v,
    const Tensor out, const Tensor lse_log2, const Tensor kv_indices, const Tensor kv_num_blocks,
    const std::optional<Tensor> q_indices, const std::optional<Tensor> q_offsets, const Tensor kv_block_sizes,
    double sm_scale, int64_t block_size, bool deterministic, bool needs_dq, bool needs_dkv) {
  BackwardInputs in{&dout,
                    q,
                    k,
                    v,
                    lse_log2,
                    nullptr,
                    kv_indices,
                    kv_num_blocks,
                    q_indices,
                    q_offsets,
                    kv_block_sizes,
                    sm_scale,
                    block_size,
                    deterministic,
                    needs_dq,
                    needs_dkv};
  const Problem p = checked_backward(in);
  expect("out", out, p.scalar_type, {p.B, p.Hq, p.Sq, p.D});
  if (dlse) expect("dlse", *dlse, ScalarType::Float, {p.B, p.Hq, p.Sq});
  const int32_t device = device_of(in);
  common_device({{"q", &q}, {"out", &out}, {"dlse", dlse ? &*dlse : nullptr}});
  const DeviceGuard guard(device);
  Tensor dq = needs_dq ? empty(q, {p.B, p.Hq, p.Sq, p.D}, p.scalar_type) : empty(q, {0}, p.scalar_type);
  Tensor dk = needs_dkv ? empty(k, {p.B, p.Hkv, p.Skv, p.D}, p.scalar_type) : empty(k, {0}, p.scalar_type);
  Tensor dv = needs_dkv ? empty(v, {p.B, p.Hkv, p.Skv, p.D}, p.scalar_type) : empty(v, {0}, p.scalar_type);
  if (p.B * p.Hq * p.Nq * p.Nkv * p.M == 0) {
    for (Tensor* x : {&dq, &dk, &dv}) torch::stable::zero_(*x);
    return {dq, dk, dv};
  }
  const cudaStream_t stream = current_stream(device);
  const Tensor readable_dout = tma_readable(dout);
  const Tensor delta = make_delta(p, out, readable_dout, dlse, stream);
  in.dout = &readable_dout;
  in.delta = &delta;
  Tensor dq_accum = needs_dq ? empty(q, {p.B, p.Hq, p.Sq, p.D}, ScalarType::Float) : empty(q, {0}, ScalarType::Float);
  run_backward(p, device, in, dq_accum, dk, dv);
  if (needs_dq) {
    sm90::launch_finish_dq(pointer<const float>(dq_accum), dq.data_ptr(), static_cast<float>(sm_scale),
                           p.B * p.Hq * p.Nq, p.dtype, static_cast<int>(p.D), stream);
  }
  return {dq, dk, dv};
}

}  // namespace
}  // namespace vsa

STABLE_TORCH_LIBRARY_IMPL(vsa, CUDA, m) {
  m.impl("attention_sm90", TORCH_BOX(&vsa::attention_sm90));
  m.impl("attention_sm90.out", TORCH_BOX(&vsa::attention_sm90_out));
  m.impl("attention_backward_sm90", TORCH_BOX(&vsa::attention_backward_sm90));
  m.impl("attention_backward_sm90.out", TORCH_BOX(&vsa::attention_backward_sm90_out));
  m.impl("attention_backward_sm90_eager", TORCH_BOX(&vsa::attention_backward_sm90_eager));
}
