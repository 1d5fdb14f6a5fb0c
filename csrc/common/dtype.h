// SPDX-License-Identifier: BSD-3-Clause
//
// The element types of tensors, and the one way from a run-time DataType to a type.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>

#include "host_device.h"

namespace tree_attention {

enum class DataType : int32_t { kFloat32, kBFloat16, kFloat16 };

// 16-bit elements are bits with a name; arithmetic is done in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Size in bytes of an element.
TREE_ATTENTION_HOST_DEVICE int32_t element_size(DataType dtype) {
  return dtype == DataType::kFloat32 ? 4 : 2;
}

[[noreturn]] inline void refuse_dtype(DataType dtype) {
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
  }
#if defined(__CUDA_ARCH__)
  __trap();
#else
  refuse_dtype(dtype);
#endif
}

}  // namespace tree_attention
