// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

namespace tree_attention {

// The partition of the kernels as a table: for tests, pictures and documentation.
at::Tensor lean_schedule(const at::Tensor& num_tiles, int64_t num_workers);

}  // namespace tree_attention
