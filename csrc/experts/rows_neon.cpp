// SPDX-License-Identifier: BSD-3-Clause
#if defined(__aarch64__)

#define TREE_ATTENTION_SIMD "cpu/vector/simd_neon.h"
#include "experts/vector_rows.h"

namespace tree_attention::cpu {
void multiply_rows_neon(const WeightRows& w) { multiply_weight_rows(w); }
}  // namespace tree_attention::cpu

#endif
