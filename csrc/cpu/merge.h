// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "common/merge_params.h"

namespace tree_attention::cpu {

// Merges the parts of every row in the canonical order of softmax_state.h.
void merge_states(const MergeParams& params);

}  // namespace tree_attention::cpu
