// SPDX-License-Identifier: BSD-3-Clause
//
// What a merge_states kernel is given. Strides are in elements; head_dim is contiguous.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tree_attention {

struct MergeParams {
  const void* o_parts;                 // [num_parts, num_rows, head_dim]
  const float* lse_parts;              // [num_parts, num_rows]
  void* o;                             // [num_rows, head_dim] contiguous
  float* lse;                          // [num_rows] contiguous
  int64_t o_stride[2], lse_stride[2];  // {part, row}
  int64_t num_parts, num_rows, head_dim;
  DataType dtype;      // of o_parts
  DataType out_dtype;  // of o
};

}  // namespace tree_attention
