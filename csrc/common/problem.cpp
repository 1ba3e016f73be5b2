#include "problem.h"

#include <algorithm>
#include <limits>

#include "../checks.h"

namespace vsa {

void expect_int(const char* what, int64_t value) {
  if (value > std::numeric_limits<int>::max()) refuse(what, text(value), "less than 2^31");
}

Problem checked_problem(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_indices,
                        const Tensor& kv_num_blocks, const Tensor& kv_block_sizes, int64_t block_size) {
  for (const Named& operand : {Named{"q", &q}, Named{"k", &k}, Named{"kv_indices", &kv_indices}}) {
    if (operand.x->dim() != 4) refuse(operand.name, text(operand.x->dim(), " dimensions"), "4 dimensions");
  }
  Problem p{};
  p.dtype = operand_dtype("q", q);
  p.scalar_type = q.scalar_type();
  p.B = q.size(0), p.Hq = q.size(1), p.Sq = q.size(2), p.D = q.size(3);
  p.Hkv = k.size(1), p.Skv = k.size(2), p.M = kv_indices.size(3);
  if (p.D != 64 && p.D != 128) refuse("q.shape[3]", text(p.D), "64 or 128");
  if (block_size != 64 && block_size != 128) refuse("block_size", text(block_size), "64 or 128");
  if (p.Sq % block_size != 0) refuse("q.shape[2]", text(p.Sq), text("a multiple of block_size, ", block_size));
  if (p.Skv % block_size != 0) refuse("k.shape[2]", text(p.Skv), text("a multiple of block_size, ", block_size));
  if (p.Hkv == 0 || p.Hq % p.Hkv != 0) refuse("k.shape[1]", text(p.Hkv), text("a divisor of the heads of q, ", p.Hq));
  p.block_size = static_cast<int>(block_size);
  p.Nq = p.Sq / block_size;
  p.Nkv = p.Skv / block_size;
  expect("k", k, p.scalar_type, {p.B, p.Hkv, p.Skv, p.D});
  expect("v", v, p.scalar_type, {p.B, p.Hkv, p.Skv, p.D});
  expect("kv_indices", kv_indices, ScalarType::Int, {p.B, p.Hq, p.Nq, p.M});
  expect("kv_num_blocks", kv_num_blocks, ScalarType::Int, {p.B, p.Hq, p.Nq});
  expect("kv_block_sizes", kv_block_sizes, ScalarType::Int, {p.Nkv});
  expect_int("q.shape[2] * q.shape[3]", p.Sq * p.D);
  expect_int("k.shape[2] * k.shape[3]", p.Skv * p.D);
  expect_int("kv_indices.shape[2] * kv_indices.shape[3]", p.Nq * p.M);
  expect_int("q.shape[0] * q.shape[1] * blocks", p.B * p.Hq * std::max(p.Nq, p.Nkv));
  return p;
}

}  // namespace vsa
