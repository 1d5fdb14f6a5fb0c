// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tree_attention::cpu {

// out [rows, inputs]: the numbers of weights of 4 bits [rows, inputs / 2], packed as ExpertParams
// says, times their scales [rows, inputs / group_size], which have the dtype of out.
void unpack(const uint8_t* packed, const void* scales, DataType dtype, int64_t rows, int64_t inputs,
            int64_t group_size, void* out);

}  // namespace tree_attention::cpu
