// How dq's accumulator stands in memory: what the Drain of bwd/drain.cuh adds, and vsa_inductor/backends/sm100.py says
// to generated code (factors (4, 16, 32, 4), permutation (1, 3, 0, 2)).
//
//   [w 4][c 16][l 32][i 4] fp32 = dq[token 4 c + i][column 32 w + l]
#pragma once

namespace vsa::sm100 {

struct AccumulatorOrder {
  static constexpr int kTokens = 64;
  static constexpr int kColumns = 128;
  static constexpr int at(int token, int column) {
    return ((column / 32 * 16 + token / 4) * 32 + column % 32) * 4 + token % 4;
  }
};

}  // namespace vsa::sm100
