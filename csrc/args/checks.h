// SPDX-License-Identifier: BSD-3-Clause
//
// Translates torch's dtypes to this library's, and checks what several operators require of their
// arguments. A message names operator, argument, requirement and value.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <limits>
#include <optional>

#include "common/dtype.h"

namespace tree_attention {

// TORCH_CHECK_VALUE with the name of the operator, which is kOp where this is used, in front of the
// message.
#define CHECK_ARG(condition, ...) TORCH_CHECK_VALUE(condition, kOp, ": ", __VA_ARGS__)

// The largest scale of scores, softcap and 1 / softcap: a product of two is a normal float32.
constexpr double kLargestScale = 1e15;

// The name of a dtype as Python spells it, for messages.
inline auto dtype_name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

inline bool has_8_bits(at::ScalarType dtype) {
  return dtype == at::kChar || dtype == at::kFloat8_e4m3fn;
}

inline DataType data_type(at::ScalarType dtype, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op, ": ",
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

// The elements of a tensor whose dtype has been checked. torch's own const_data_ptr<T>() has
// another symbol in 2.11 than in later releases.
template <typename T>
const T* elements(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

struct ArgumentChecks {
  const char* op;

  void shape(const char* argument, const char* axes, const at::Tensor& tensor,
             at::IntArrayRef expected) const {
    TORCH_CHECK_VALUE(tensor.sizes() == expected, op, ": ", argument, " must have shape ", axes,
                      " = ", expected, ", got ", tensor.sizes());
  }

  void last_axis(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK_VALUE(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, op, ": ", argument,
                      " must have a contiguous last axis, got stride ", tensor.stride(-1));
  }

  void dtype(const char* argument, const at::Tensor& tensor, at::ScalarType expected) const {
    TORCH_CHECK_VALUE(tensor.scalar_type() == expected, op, ": ", argument, " must be ",
                      dtype_name(expected), ", got ", dtype_name(tensor.scalar_type()));
  }

  void device(const char* argument, const at::Tensor& tensor, const char* first_argument,
              const at::Tensor& first) const {
    TORCH_CHECK_VALUE(tensor.device() == first.device(), op, ": ", argument, " must be on ",
                      first_argument, "'s device ", first.device(), ", got ", tensor.device());
  }

  int32_t to_int32(const char* what, int64_t value) const {
    TORCH_CHECK_VALUE(value <= std::numeric_limits<int32_t>::max(), op, ": ", what,
                      " must be below 2^31, got ", value);
    return static_cast<int32_t>(value);
  }

  // The scales [first three axes of `k`] of keys and values of 8 bits: both or none, none for
  // others, and both for int8.
  void scales(const char* axes, const at::Tensor& k, const std::optional<at::Tensor>& k_scale,
              const std::optional<at::Tensor>& v_scale) const {
    const auto dtype_of_k = k.scalar_type();
    const auto check = [&](const char* name, const std::optional<at::Tensor>& scale,
                           const char* other_name, const std::optional<at::Tensor>& other) {
      if (!scale) {
        TORCH_CHECK_VALUE(dtype_of_k != at::kChar, op, ": ", name,
                          " must be given for int8 keys, got None");
        TORCH_CHECK_VALUE(!other, op, ": ", name, " must be given with ", other_name, ", got None");
        return;
      }
      TORCH_CHECK_VALUE(has_8_bits(dtype_of_k), op, ": ", name, " must be None for ",
                        dtype_name(dtype_of_k), " keys, got a tensor of shape ", scale->sizes());
      dtype(name, *scale, at::kFloat);
      shape(name, axes, *scale, k.sizes().slice(0, 3));
    };
    check("k_scale", k_scale, "v_scale", v_scale);
    check("v_scale", v_scale, "k_scale", k_scale);
  }
};

inline void copy_strides(int64_t (&strides)[3], const at::Tensor& tensor) {
  for (int axis = 0; axis < 3; ++axis) strides[axis] = tensor.stride(axis);
}

}  // namespace tree_attention
