// SPDX-License-Identifier: BSD-3-Clause
#if defined(__aarch64__)

#define TREE_ATTENTION_SIMD "cpu/vector/simd_neon.h"
#include "cpu/index/vector_scores.h"

namespace tree_attention::cpu {
constinit const ScoreKernels neon_scores = kVectorScores;
}

#endif
