// SPDX-License-Identifier: BSD-3-Clause
//
// The only validation of linear_of_experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tree_attention {

// Every argument of the schema.
struct ExpertArgs {
  const at::Tensor& x;
  const at::Tensor& experts;
  const at::Tensor& weight;
  const std::optional<at::Tensor>& scale;
  int64_t front;
  bool is_transposed;
};

void check_experts(const ExpertArgs& args);

}  // namespace tree_attention
