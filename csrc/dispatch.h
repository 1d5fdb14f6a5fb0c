// SPDX-License-Identifier: BSD-3-Clause
//
// Between torch's run-time dtypes and ours.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "common/decode_params.h"

namespace tree_attention {

// As Python spells it, for messages.
inline auto dtype_name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

inline DataType data_type(at::ScalarType dtype, const char* op, const char* argument) {
  switch (dtype) {
    case at::kFloat:
      return DataType::kFloat32;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kHalf:
      return DataType::kFloat16;
    default:
      TORCH_CHECK(false, op, ": ", argument, " must be float32, bfloat16 or float16, got ",
                  dtype_name(dtype));
  }
}

}  // namespace tree_attention
