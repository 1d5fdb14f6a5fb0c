// SPDX-License-Identifier: BSD-3-Clause
//
// The sum of what ranks sent.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"

namespace tree_attention::cpu {

// out = the sum of rows of `count` numbers in float32, from the first row on, rounded to their
// dtype: float32 or bfloat16. One of the rows may be `out`. One pass over memory, where a tensor
// library makes one for each row and two to convert.
void sum_rows(const std::vector<const void*>& rows, int64_t count, DataType dtype, void* out);

}  // namespace tree_attention::cpu
