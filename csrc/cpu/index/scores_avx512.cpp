// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include "cpu/index/scores.h"
#include "cpu/vector/before_target.h"

#include "cpu/targets/avx512.h"

#define TREE_ATTENTION_SIMD "cpu/vector/simd_avx512.h"
#include "cpu/index/vector_scores.h"

#include "cpu/targets/end.h"

namespace tree_attention::cpu {
constinit const ScoreKernels avx512_scores = kVectorScores;
}

#endif
