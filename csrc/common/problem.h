// The sizes of operands and lists that fit together, checked once for all native attention operators.
#pragma once

#include "../params.h"
#include "operands.h"

namespace vsa {

constexpr double kLog2E = 1.4426950408889634;

// Letters are those of params.h.
struct Problem {
  Dtype dtype;
  ScalarType scalar_type;
  int64_t B, Hq, Hkv, Sq, Skv, D, Nq, Nkv, M;
  int block_size;
};

// Refuses what does not fit in 32 bits.
void expect_int(const char* what, int64_t value);

// Refuses operands and lists that do not fit together, or sizes that no native kernel takes.
Problem checked_problem(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_indices,
                        const Tensor& kv_num_blocks, const Tensor& kv_block_sizes, int64_t block_size);

template <typename Params>
void fill_sizes(Params& params, const Problem& p) {
  params.B = static_cast<int>(p.B);
  params.Hq = static_cast<int>(p.Hq);
  params.Hkv = static_cast<int>(p.Hkv);
  params.Nq = static_cast<int>(p.Nq);
  params.Nkv = static_cast<int>(p.Nkv);
  params.M = static_cast<int>(p.M);
}

}  // namespace vsa
