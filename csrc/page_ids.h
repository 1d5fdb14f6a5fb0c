// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include "common/decode_params.h"

namespace tree_attention {

// Each range of a query that has several is a sequence of `params` (range_parts.h).
inline void check_page_id(const DecodeParams& params, int64_t batch, int64_t page, int32_t id) {
  TORCH_CHECK(0 <= id && id < params.num_pages,
              "lean_decode: page_table must hold page ids in [0, ", params.num_pages,
              ") where key_ranges needs them, got ", id, " for page ", page, " of sequence ",
              batch / params.num_ranges);
}

}  // namespace tree_attention
