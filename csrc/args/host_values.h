// SPDX-License-Identifier: BSD-3-Clause
//
// Checks of what tensors of indices hold, where that is in host memory.
#pragma once

#include <c10/util/Exception.h>

#include "common/append_params.h"
#include "common/decode_params.h"

namespace tree_attention {

// Each range of a query that has several is a sequence of `params` (ranges.h).
inline void check_page_id(const DecodeParams& params, int64_t batch, int64_t page, int32_t id) {
  TORCH_CHECK_VALUE(0 <= id && id < params.num_pages,
                    "lean_decode: page_table must hold page ids in [0, ", params.num_pages,
                    ") where key_ranges needs them, got ", id, " for page ", page, " of sequence ",
                    batch % (params.batch / params.num_ranges));
}

// Throws for the first slot out of range.
inline void check_slots(const AppendParams& p) {
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t token = 0; token < p.tokens; ++token) {
      const int64_t slot = p.slots[batch * p.slots_stride[0] + token * p.slots_stride[1]];
      TORCH_CHECK_VALUE(-1 <= slot && slot < p.capacity, "append_kv: slot_mapping must be in [-1, ",
                        p.capacity, "), got ", slot, " for token ", token, " of sequence ", batch);
    }
  }
}

}  // namespace tree_attention
