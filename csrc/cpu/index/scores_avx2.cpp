// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include "cpu/index/scores.h"
#include "cpu/vector/before_target.h"

#include "cpu/targets/avx2.h"

#define TREE_ATTENTION_SIMD "cpu/vector/simd_avx2.h"
#include "cpu/index/vector_scores.h"

#include "cpu/targets/end.h"

namespace tree_attention::cpu {
constinit const ScoreKernels avx2_scores = kVectorScores;
}

#endif
