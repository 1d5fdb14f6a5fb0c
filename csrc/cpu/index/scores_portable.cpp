// SPDX-License-Identifier: BSD-3-Clause
#define TREE_ATTENTION_SIMD "cpu/vector/simd_portable.h"
#include "cpu/index/vector_scores.h"

namespace tree_attention::cpu {
constinit const ScoreKernels portable_scores = kVectorScores;
}
