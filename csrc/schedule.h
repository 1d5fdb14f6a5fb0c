// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

namespace tree_attention {

// The partition of partition.h as a table for tests, pictures and documentation, int64 [segments,
// 4]: a segment's worker, its output, and the first tile and the end of its tiles in that output.
at::Tensor lean_schedule(const at::Tensor& num_tiles, int64_t num_workers);

}  // namespace tree_attention
