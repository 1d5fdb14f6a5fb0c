// SPDX-License-Identifier: BSD-3-Clause
//
// From torch's dtypes to ours.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "common/dtype.h"

namespace tree_attention {

// The name of a dtype as Python spells it, for messages.
inline auto dtype_name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

inline bool has_8_bits(at::ScalarType dtype) {
  return dtype == at::kChar || dtype == at::kFloat8_e4m3fn;
}

inline DataType data_type(at::ScalarType dtype, const char* op, const char* argument) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op, ": ",
              argument, " must be float32, bfloat16 or float16, got ", dtype_name(dtype));
  return dtype == at::kFloat      ? DataType::kFloat32
         : dtype == at::kBFloat16 ? DataType::kBFloat16
                                  : DataType::kFloat16;
}

// The DataType of keys and values, which are in `dtype` or have 8 bits.
inline DataType kv_data_type(at::ScalarType kv_dtype, DataType dtype) {
  return kv_dtype == at::kChar            ? DataType::kInt8
         : kv_dtype == at::kFloat8_e4m3fn ? DataType::kFloat8
                                          : dtype;
}

}  // namespace tree_attention
