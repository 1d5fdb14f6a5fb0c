// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "common/append_params.h"

namespace tree_attention::cpu {

// Writes the rows of the new tokens at their slots, in the dtype of the cache. Throws, with nothing
// written, for a slot out of range.
void append_kv(const AppendParams& params);

}  // namespace tree_attention::cpu
