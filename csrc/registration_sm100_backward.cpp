// vsa::attention_backward_sm100 and its whole in one trip for torch. Emulated, not yet run on silicon.
//
// The native operator reads Q^T and dO^T and gives dq's accumulator (vsa_inductor/backends/sm100.py); the other form
// makes the former and finishes the latter. Letters are those of params.h, with one number of heads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "checks.h"
#include "common/operands.h"
#include "common/problem.h"
#include "registration_sm100.h"
#include "sm100/bwd/launch.h"
#include "sm100/order.h"
#include "sm100/prepare.h"

namespace vsa {
namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int64_t kHeadDim = 128;
constexpr int64_t kBlock = sm100::kWorkBlock;
// Of the lines of dq's accumulator, those that L2 keeps longest where it does not hold all. Not measured.
constexpr float kEvictLast = 0.5f;

struct Sizes {
  int64_t B, H, Sq, Skv, Nq, Nkv, M;
};

// What both forms take besides Q and dO.
struct Inputs {
  const Tensor &k, &v, &lse_log2, &kv_indices, &kv_num_blocks;
  const std::optional<Tensor>&q_indices, &q_offsets;
  const Tensor& kv_block_sizes;
  double sm_scale;
  int64_t block_size;
  bool deterministic, needs_dq, needs_dkv;
  const Tensor* work_order = nullptr;  // given by the caller: a permutation of all items, which is not looked into
};

// Refuses inputs that do not fit together, for queries of `Sq` tokens a head.
Sizes checked_sizes(const Inputs& in, int64_t H, int64_t Sq) {
  for (const Named& x : {Named{"k", &in.k}, Named{"kv_indices", &in.kv_indices}}) {
    if (x.x->dim() != 4) refuse(x.name, text(x.x->dim(), " dimensions"), "4 dimensions");
  }
  if (in.block_size != kBlock) refuse("block_size", text(in.block_size), text(kBlock));
  Sizes s{in.k.size(0), H, Sq, in.k.size(2), Sq / kBlock, in.k.size(2) / kBlock, in.kv_indices.size(3)};
  if (s.Skv % kBlock != 0) refuse("k.shape[2]", text(s.Skv), text("a multiple of block_size, ", kBlock));
  expect("k", in.k, ScalarType::BFloat16, {s.B, s.H, s.Skv, kHeadDim});
  expect("v", in.v, ScalarType::BFloat16, {s.B, s.H, s.Skv, kHeadDim});
  expect("lse_log2", in.lse_log2, ScalarType::Float, {s.B, s.H, s.Sq});
  expect("kv_indices", in.kv_indices, ScalarType::Int, {s.B, s.H, s.Nq, s.M});
  expect("kv_num_blocks", in.kv_num_blocks, ScalarType::Int, {s.B, s.H, s.Nq});
  expect("kv_block_sizes", in.kv_block_sizes, ScalarType::Int, {s.Nkv});
  expect_scale(in.sm_scale);
  expect_int("q.shape[2] * q.shape[3]", s.Sq * kHeadDim);
  expect_int("k.shape[2] * k.shape[3]", s.Skv * kHeadDim);
  expect_int("kv_indices.shape[2] * kv_indices.shape[3]", s.Nq * s.M);
  expect_int("q.shape[0] * q.shape[1] * blocks", s.B * s.H * std::max(s.Nq, s.Nkv));
  // Of lengths that no order of work can be made for.
  sm100::plan_work(s.Nkv, s.Sq, sizeof(float), in.work_order != nullptr);
  if (in.work_order != nullptr) expect("work_order", *in.work_order, ScalarType::Int, {s.B * s.H * s.Nkv});
  if (!in.needs_dkv) return s;
  if (!in.q_indices || !in.q_offsets) refuse("q_indices, q_offsets", "None", "the lists of vsa::transpose_blocks");
  expect("q_indices", *in.q_indices, ScalarType::Int, {s.B, s.H, s.Nq * s.M});
  expect("q_offsets", *in.q_offsets, ScalarType::Int, {s.B, s.H, s.Nkv + 1});
  return s;
}

// The device of all inputs and of three more tensors.
int32_t device_of(const Inputs& in, const Named& first, const Named& second, const Named& third) {
  return common_device({first,
                        {"k", &in.k},
                        {"v", &in.v},
                        second,
                        third,
                        {"lse_log2", &in.lse_log2},
                        {"kv_indices", &in.kv_indices},
                        {"kv_num_blocks", &in.kv_num_blocks},
                        {"q_indices", in.needs_dkv ? &*in.q_indices : nullptr},
                        {"q_offsets", in.needs_dkv ? &*in.q_offsets : nullptr},
                        {"kv_block_sizes", &in.kv_block_sizes},
                        {"work_order", in.work_order}});
}

std::pair<Tensor, Tensor> transposed_lists(const Tensor& indices, const Tensor& counts, int64_t kv_blocks) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 3> stack{from(indices), from(counts), from(kv_blocks)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("vsa::transpose_blocks", "", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

struct Gradients {
  Tensor dq_accum, dk, dv;
};

// Whole gradients, whatever is needed; `grads` are filled. Arguments are checked, and no size is 0.
void run_main(const Sizes& s, const Inputs& in, const Tensor& q_transposed, const Tensor& dout_transposed, double scale,
              const Tensor& delta, Gradients& grads, cudaStream_t stream) {
  const Tensor lse_log2 = dense(in.lse_log2);
  const Tensor indices = dense(in.kv_indices), counts = dense(in.kv_num_blocks), sizes = dense(in.kv_block_sizes);
  // Where only dq is wanted nobody made them. The main kernel gives all gradients.
  const auto lists =
      in.needs_dkv ? std::pair(dense(*in.q_indices), dense(*in.q_offsets)) : transposed_lists(indices, counts, s.Nkv);
  const Operand k = block_operand(in.k, Dtype::kBFloat16);
  const Operand v = block_operand(in.v, Dtype::kBFloat16);
  const auto plane = [&](const Tensor& x) {
    return matrix_map(x.data_ptr(), s.H * kHeadDim, s.B * s.Sq, kHeadDim, Dtype::kBFloat16);
  };
  const int rows = static_cast<int>(s.B * s.H);
  const sm100::WorkPlan plan = sm100::plan_work(s.Nkv, s.Sq, sizeof(float), in.work_order != nullptr);
  auto order = scratch(in.k, sm100::order_bytes(plan, rows, s.Nkv));
  if (order) {
    sm100::launch_order({pointer<const int>(lists.second), pointer<int>(*order), rows, static_cast<int>(s.Nq),
                         static_cast<int>(s.Nkv), plan.bin_width, plan.snake},
                        stream);
  }
  if (in.work_order != nullptr) order = dense(*in.work_order);
  sm100::BackwardParams params{};
  params.k = k.map;
  params.v = v.map;
  params.q_transposed = plane(q_transposed);
  params.dout_transposed = plane(dout_transposed);
  params.lse_log2 = pointer<const float>(lse_log2);
  params.delta = pointer<const float>(delta);
  params.kv_indices = pointer<const int>(indices);
  params.kv_num_blocks = pointer<const int>(counts);
  params.q_indices = pointer<const int>(lists.first);
  params.q_offsets = pointer<const int>(lists.second);
  params.kv_block_sizes = pointer<const int>(sizes);
  params.order = order ? pointer<const int>(*order) : nullptr;
  params.dq_accum = pointer<float>(grads.dq_accum);
  params.dk = pointer<__nv_bfloat16>(grads.dk);
  params.dv = pointer<__nv_bfloat16>(grads.dv);
  params.B = static_cast<int>(s.B);
  params.H = static_cast<int>(s.H);
  params.Nq = static_cast<int>(s.Nq);
  params.Nkv = static_cast<int>(s.Nkv);
  params.M = static_cast<int>(s.M);
  params.sm_scale = static_cast<float>(scale);
  params.sm_scale_log2 = static_cast<float>(scale * kLog2E);
  params.evict_last = plan.waves ? kEvictLast : 0.0f;
  sm100::BackwardLaunch launch{};
  launch.waves = plan.waves;
  launch.deterministic = in.deterministic;
  if (!in.deterministic) {
    sm100::ClearParams clear{};
    clear.dq_accum = pointer<float>(grads.dq_accum);
    clear.B = params.B, clear.H = params.H, clear.Nq = params.Nq, clear.Nkv = params.Nkv;
    sm100::launch_clear(clear, stream);
  }
  sm100::launch_backward(params, launch, stream);
}

Tensor accumulator_of(const Sizes& s, const Tensor& like) {
  return empty(like, {s.B, s.H, s.Sq, kHeadDim}, ScalarType::Float);
}

Tensor key_gradient(const Sizes& s, const Tensor& like) {
  return empty(like, {s.B, s.H, s.Skv, kHeadDim}, ScalarType::BFloat16);
}

// Fills those of `wanted` that are needed.
void run_native(const Sizes& s, const Inputs& in, const Tensor& q_transposed, const Tensor& dout_transposed,
                const Tensor& delta, Gradients& wanted, cudaStream_t stream) {
  if (s.B * s.H * s.Nq * s.Nkv * s.M == 0) {
    for (Tensor* x : {&wanted.dq_accum, &wanted.dk, &wanted.dv}) torch::stable::zero_(*x);
    return;
  }
  const auto [scaled_q, scale] = positively_scaled(q_transposed, in.sm_scale);
  Gradients grads = wanted;
  if (!in.needs_dq) grads.dq_accum = accumulator_of(s, in.k);
  if (!in.needs_dkv) grads.dk = key_gradient(s, in.k), grads.dv = key_gradient(s, in.k);
  run_main(s, in, dense(scaled_q), dense(dout_transposed), scale, dense(delta), grads, stream);
}

Sizes checked_native(const Inputs& in, const Tensor& dout, const Tensor& q, const Tensor& delta) {
  for (const Named& x : {Named{"q", &q}, Named{"dout", &dout}}) {
    if (x.x->dim() != 2) refuse(x.name, text(x.x->dim(), " dimensions"), "2 dimensions: [H * D, B * S]");
  }
  if (in.k.dim() != 4) refuse("k", text(in.k.dim(), " dimensions"), "4 dimensions");
  const int64_t B = in.k.size(0), H = in.k.size(1);
  if (B == 0 || q.size(1) % (B * kBlock) != 0) {
    refuse("q.shape[1]", text(q.size(1)), text("a multiple of block_size, ", kBlock, ", for each of ", B));
  }
  const Sizes s = checked_sizes(in, H, q.size(1) / B);
  expect("q", q, ScalarType::BFloat16, {H * kHeadDim, B * s.Sq});
  expect("dout", dout, ScalarType::BFloat16, {H * kHeadDim, B * s.Sq});
  expect("delta", delta, ScalarType::Float, {B, H, s.Sq});
  return s;
}

void attention_backward_sm100_out(const Tensor dout, const Tensor q, const Tensor k, const Tensor v,
                                  const Tensor lse_log2, const Tensor delta, const Tensor kv_indices,
                                  const Tensor kv_num_blocks, const std::optional<Tensor> q_indices,
                                  const std::optional<Tensor> q_offsets, const Tensor kv_block_sizes, double sm_scale,
                                  int64_t block_size, bool deterministic, bool needs_dq, bool needs_dkv,
                                  Tensor dq_accum, Tensor dk, Tensor dv) {
  const Inputs in{k,        v,          lse_log2,      kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes,
                  sm_scale, block_size, deterministic, needs_dq,   needs_dkv};
  const Sizes s = checked_native(in, dout, q, delta);
  if (needs_dq) expect_output("dq_accum", dq_accum, ScalarType::Float, {s.B, s.H, s.Sq, kHeadDim});
  if (needs_dkv) {
    expect_output("dk", dk, ScalarType::BFloat16, {s.B, s.H, s.Skv, kHeadDim});
    expect_output("dv", dv, ScalarType::BFloat16, {s.B, s.H, s.Skv, kHeadDim});
  }
  const int32_t device = device_of(in, {"q", &q}, {"dout", &dout}, {"delta", &delta});
  common_device({{"q", &q}, {"dq_accum", &dq_accum}, {"dk", &dk}, {"dv", &dv}});
  const DeviceGuard guard(device);
  Gradients grads{dq_accum, dk, dv};
  run_native(s, in, q, dout, delta, grads, current_stream(device));
}

std::tuple<Tensor, Tensor, Tensor> native_backward(const Inputs& in, const Tensor& dout, const Tensor& q,
                                                   const Tensor& delta) {
  const Sizes s = checked_native(in, dout, q, delta);
  const int32_t device = device_of(in, {"q", &q}, {"dout", &dout}, {"delta", &delta});
  const DeviceGuard guard(device);
  Gradients grads{in.needs_dq ? accumulator_of(s, q) : empty(q, {0}, ScalarType::Float),
                  in.needs_dkv ? key_gradient(s, in.k) : empty(in.k, {0}, ScalarType::BFloat16),
                  in.needs_dkv ? key_gradient(s, in.v) : empty(in.v, {0}, ScalarType::BFloat16)};
  run_native(s, in, q, dout, delta, grads, current_stream(device));
  return {grads.dq_accum, grads.dk, grads.dv};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_sm100(
    const Tensor dout, const Tensor q, const Tensor k, const Tensor v, const Tensor lse_log2, const Tensor delta,
    const Tensor kv_indices, const Tensor kv_num_blocks, const std::optional<Tensor> q_indices,
    const std::optional<Tensor> q_offsets, const Tensor kv_block_sizes, double sm_scale, int64_t block_size,
    bool deterministic, bool needs_dq, bool needs_dkv) {
  return native_backward({k, v, lse_log2, kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes, sm_scale,
                          block_size, deterministic, needs_dq, needs_dkv},
                         dout, q, delta);
}

// With the order of its work items: place n of a launch takes item work_order[n], (b * H + h) * Nkv + kv block.
std::tuple<Tensor, Tensor, Tensor> attention_backward_sm100_ordered(
    const Tensor dout, const Tensor q, const Tensor k, const Tensor v, const Tensor lse_log2, const Tensor delta,
    const Tensor kv_indices, const Tensor kv_num_blocks, const std::optional<Tensor> q_indices,
    const std::optional<Tensor> q_offsets, const Tensor kv_block_sizes, double sm_scale, int64_t block_size,
    bool deterministic, bool needs_dq, bool needs_dkv, const Tensor work_order) {
  return native_backward({k, v, lse_log2, kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes, sm_scale,
                          block_size, deterministic, needs_dq, needs_dkv, &work_order},
                         dout, q, delta);
}

// The whole backward but for the transposition of the lists: what eager runs, in one trip from Python.
std::tuple<Tensor, Tensor, Tensor> attention_backward_sm100_eager(
    const Tensor dout, const std::optional<Tensor> dlse, const Tensor q, const Tensor k, const Tensor v,
    const Tensor out, const Tensor lse_log2, const Tensor kv_indices, const Tensor kv_num_blocks,
    const std::optional<Tensor> q_indices, const std::optional<Tensor> q_offsets, const Tensor kv_block_sizes,
    double sm_scale, int64_t block_size, bool deterministic, bool needs_dq, bool needs_dkv) {
  const Inputs in{k,        v,          lse_log2,      kv_indices, kv_num_blocks, q_indices, q_offsets, kv_block_sizes,
                  sm_scale, block_size, deterministic, needs_dq,   needs_dkv};
  sm100::expect_prepared(dout, dlse, q, out);
  const Sizes s = checked_sizes(in, q.size(1), q.size(2));
  if (q.size(0) != s.B) refuse("q.shape[0]", text(q.size(0)), text(s.B, ", as k"));
  const int32_t device = device_of(in, {"q", &q}, {"dout", &dout}, {"out", &out});
  common_device({{"q", &q}, {"dlse", dlse ? &*dlse : nullptr}});
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  Gradients grads{needs_dq ? accumulator_of(s, q) : empty(q, {0}, ScalarType::Float),
                  needs_dkv ? key_gradient(s, k) : empty(k, {0}, ScalarType::BFloat16),
                  needs_dkv ? key_gradient(s, v) : empty(v, {0}, ScalarType::BFloat16)};
  const auto [dout_transposed, q_transposed, delta] = sm100::prepared(dout, dlse, q, out, stream);
  run_native(s, in, q_transposed, dout_transposed, delta, grads, stream);
  Tensor dq = needs_dq ? sm100::finished(grads.dq_accum, sm_scale, stream) : empty(q, {0}, ScalarType::BFloat16);
  return {dq, grads.dk, grads.dv};
}

}  // namespace
}  // namespace vsa

STABLE_TORCH_LIBRARY_IMPL(vsa, CUDA, m) {
  m.impl("attention_backward_sm100", TORCH_BOX(&vsa::attention_backward_sm100));
  m.impl("attention_backward_sm100.ordered", TORCH_BOX(&vsa::attention_backward_sm100_ordered));
  m.impl("attention_backward_sm100.out", TORCH_BOX(&vsa::attention_backward_sm100_out));
  m.impl("attention_backward_sm100_eager", TORCH_BOX(&vsa::attention_backward_sm100_eager));
}
