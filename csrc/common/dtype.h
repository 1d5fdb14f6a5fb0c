// SPDX-License-Identifier: BSD-3-Clause
//
// The element types of tensors, and the one way from a run-time DataType to a type.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>

#include "host_device.h"

namespace tree_attention {

// The first three are those of queries and outputs. Keys and values may also have 8 bits.
enum class DataType : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kFloat8 };

// 16-bit elements are bits with a name; arithmetic is done in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};
// float8_e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, one NaN.
struct Float8 {
  uint8_t bits;
};

// Size in bytes of an element.
TREE_ATTENTION_HOST_DEVICE int32_t element_size(DataType dtype) {
  return dtype == DataType::kFloat32                              ? 4
         : dtype == DataType::kInt8 || dtype == DataType::kFloat8 ? 1
                                                                  : 2;
}

// static: the linker might keep the copy of a unit that is compiled for other instructions.
[[noreturn]] static inline void refuse_dtype(DataType dtype) {
  char message[80];
  std::snprintf(message, sizeof(message),
                "dtype must be float32 (0), bfloat16 (1) or float16 (2), got the value %d",
                static_cast<int>(dtype));
  throw std::invalid_argument(message);
}

// Calls f.template operator()<Element>(). A kernel cannot throw and traps instead.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // f is a function of the host or of the device, like the caller
#endif
template <typename F>
TREE_ATTENTION_HOST_DEVICE auto with_dtype(DataType dtype, const F& f) {
  switch (dtype) {
    case DataType::kFloat32:
      return f.template operator()<float>();
    case DataType::kBFloat16:
      return f.template operator()<BFloat16>();
    case DataType::kFloat16:
      return f.template operator()<Float16>();
    case DataType::kInt8:
    case DataType::kFloat8:
      break;
  }
#if defined(__CUDA_ARCH__)
  __trap();
#else
  refuse_dtype(dtype);
#endif
}

// with_dtype for the elements of keys and values.
template <typename F>
auto with_kv_dtype(DataType dtype, const F& f) {
  if (dtype == DataType::kInt8) return f.template operator()<Int8>();
  if (dtype == DataType::kFloat8) return f.template operator()<Float8>();
  return with_dtype(dtype, f);
}

}  // namespace tree_attention
