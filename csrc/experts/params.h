// SPDX-License-Identifier: BSD-3-Clause
//
// What a backend gets of one product of rows with the experts that they are sent to.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tree_attention {

// All contiguous. Row i of x is multiplied with the expert whose rows it is among, and the product
// is row rows[i] of out.
struct ExpertParams {
  // Numbers of 4 bits from -8 to 7, each plus 8, are packed in blocks of 64, whose byte j has
  // number j in its lower half and number 32 + j in the upper one.
  static constexpr int64_t kPacked = 64;

  DataType x_dtype, dtype;  // of x and out, and of the weights: the same, or int8
  const void* x;            // [count, inputs], in the order of the experts
  const int64_t* rows;      // [count]
  const int64_t* begin;     // [num_experts + 1], where the rows of each expert begin
  int64_t num_experts, outputs, inputs;
  const void* weights;  // [num_experts, outputs, inputs]
  // Scales in x_dtype: null for weights of x_dtype, [num_experts, outputs] for int8, and
  // [num_experts, outputs, groups] for 4 bits.
  const void* scales;
  int64_t group_size;  // inputs / groups, kPacked or twice, where weights have 4 bits; else 0
  void* out;           // [count, outputs]
};

}  // namespace tree_attention
