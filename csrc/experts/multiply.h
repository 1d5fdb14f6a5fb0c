// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "experts/params.h"

namespace tree_attention::cpu {

// Multiplies the rows of experts, WeightRows::kMaxRows of each at most, all in one loop over the
// rows of their weights: with a loop for each expert, threads would wait for each other after all
// of them.
void multiply_experts(const ExpertParams& params);

}  // namespace tree_attention::cpu
