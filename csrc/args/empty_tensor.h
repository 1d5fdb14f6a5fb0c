// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_ops.h>

#include <optional>

namespace tree_attention {

// What at::empty does. A compiler reads its header, ATen/ops/empty.h, for longer than all others
// that a unit includes.
inline at::Tensor empty_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::_ops::empty_memory_format::call(
      c10::fromIntArrayRefSlow(sizes), c10::optTypeMetaToScalarType(options.dtype_opt()),
      options.layout_opt(), options.device_opt(), options.pinned_memory_opt(), std::nullopt);
}

}  // namespace tree_attention
