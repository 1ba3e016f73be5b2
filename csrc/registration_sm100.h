// What stands around the native backward of sm100, on torch's tensors: registration_sm100.cpp.
#pragma once

#include <optional>
#include <tuple>

#include "common/operands.h"

namespace vsa::sm100 {

// Refuses what `prepared` is not made for; devices are not looked at.
void expect_prepared(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& out);

// dO^T, Q^T and delta of checked arguments on the current device.
std::tuple<Tensor, Tensor, Tensor> prepared(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q,
                                            const Tensor& out, cudaStream_t stream);

// dq of its accumulator, likewise.
Tensor finished(const Tensor& dq_accum, double sm_scale, cudaStream_t stream);

}  // namespace vsa::sm100
