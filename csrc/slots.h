// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/Exception.h>

#include "common/append_params.h"

namespace tree_attention {

// Throws for the first slot out of range. The slots must be in host memory.
inline void check_slots(const AppendParams& p) {
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t token = 0; token < p.tokens; ++token) {
      const int64_t slot = p.slots[batch * p.slots_stride[0] + token * p.slots_stride[1]];
      TORCH_CHECK(-1 <= slot && slot < p.capacity, "append_kv: slot_mapping must be in [-1, ",
                  p.capacity, "), got ", slot, " for token ", token, " of sequence ", batch);
    }
  }
}

}  // namespace tree_attention
