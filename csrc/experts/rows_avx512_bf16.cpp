// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include "cpu/vector/before_target.h"
#include "experts/params.h"
#include "experts/rows.h"

#include "cpu/targets/avx512_bf16.h"

#define TREE_ATTENTION_SIMD "cpu/vector/simd_avx512.h"
#include "experts/pair_rows.h"

#include "cpu/targets/end.h"

namespace tree_attention::cpu {
void multiply_rows_avx512_bf16(const WeightRows& w) { multiply_weight_rows_in_pairs(w); }
}  // namespace tree_attention::cpu

#endif
