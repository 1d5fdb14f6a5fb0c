// SPDX-License-Identifier: BSD-3-Clause
#define TREE_ATTENTION_SIMD "cpu/vector/simd_portable.h"
#include "experts/vector_rows.h"

namespace tree_attention::cpu {
void multiply_rows_portable(const WeightRows& w) { multiply_weight_rows(w); }
}  // namespace tree_attention::cpu
