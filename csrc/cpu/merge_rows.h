// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "common/softmax_state.h"

namespace tree_attention::cpu {

// out = merge(a, b) over the values of one row; out may be a or b.
void merge_row(const Merge& merge, const float* a, const float* b, float* out, int64_t head_dim);

}  // namespace tree_attention::cpu
