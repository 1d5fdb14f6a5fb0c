// SPDX-License-Identifier: BSD-3-Clause
#include <string>
#include <type_traits>

#include "check.h"
#include "common/dtype.h"

namespace tree_attention {
namespace {

template <typename Expected>
void check_kv_type(DataType dtype) {
  const bool same =
      with_kv_dtype(dtype, []<typename Element>() { return std::is_same_v<Element, Expected>; });
  CHECK(same, static_cast<int>(dtype));
  CHECK(element_size(dtype) == sizeof(Expected), static_cast<int>(dtype));
}

template <typename Expected>
void check_type(DataType dtype) {
  const bool same =
      with_dtype(dtype, []<typename Element>() { return std::is_same_v<Element, Expected>; });
  CHECK(same, static_cast<int>(dtype));
  check_kv_type<Expected>(dtype);
}

}  // namespace
}  // namespace tree_attention

void test_dtype() {
  using namespace tree_attention;
  check_type<float>(DataType::kFloat32);
  check_type<BFloat16>(DataType::kBFloat16);
  check_type<Float16>(DataType::kFloat16);
  check_kv_type<Int8>(DataType::kInt8);
  check_kv_type<Float8>(DataType::kFloat8);
  std::string message;
  try {
    with_dtype(static_cast<DataType>(3), []<typename>() {});
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.ends_with("bfloat16 (1) or float16 (2), got the value 3"), message);
}
