// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "common/index_params.h"

namespace tree_attention::cpu {

// The topk keys of each query by the scores of an index, in the total order of common/entry.h.
void index_topk(const IndexParams& params);

// The first topk of the union of the parts of each row.
void merge_topk(const MergeTopkParams& params);

}  // namespace tree_attention::cpu
