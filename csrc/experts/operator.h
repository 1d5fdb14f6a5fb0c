// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tree_attention {

// Row i of the result is row i * rows / choices of `x` times the weight of `experts[i]`. Each
// expert that is hit is read once, and multiplied with all of its rows. Weights are [experts,
// outputs, inputs], or [experts, inputs, outputs] where they are transposed, of x's dtype; int8
// with a scale [experts, outputs]; or int4, packed as ExpertParams says, with a scale [experts,
// outputs, groups] for each group of inputs and `front` inputs of zeros before those of x.
at::Tensor linear_of_experts(const at::Tensor& x, const at::Tensor& experts,
                             const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                             int64_t front, bool is_transposed);

}  // namespace tree_attention
