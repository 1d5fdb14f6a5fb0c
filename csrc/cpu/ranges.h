// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "common/range_params.h"

namespace tree_attention::cpu {

void split_ranges(const RangeParams& params);

}  // namespace tree_attention::cpu
