// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors to AppendParams: the only validation of append_kv.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/append_params.h"

namespace tree_attention {

// Every argument of the schema.
struct AppendArgs {
  const at::Tensor& k;
  const std::optional<at::Tensor>& v;
  const at::Tensor& k_cache;
  const std::optional<at::Tensor>& v_cache;
  const at::Tensor& slot_mapping;
  const std::optional<at::Tensor>& k_scale;
  const std::optional<at::Tensor>& v_scale;
  bool paged;
};

AppendParams prepare_append(const AppendArgs& args);

}  // namespace tree_attention
