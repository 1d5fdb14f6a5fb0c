// SPDX-License-Identifier: BSD-3-Clause
//
// Stands for torch's header where the kernels run under sanitizers.
#pragma once

#include <sstream>
#include <stdexcept>

namespace c10 {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace c10

#define TORCH_CHECK(condition, ...)             \
  do {                                          \
    if (!(condition)) ::c10::fail(__VA_ARGS__); \
  } while (false)
#define TORCH_CHECK_VALUE TORCH_CHECK
#define TORCH_INTERNAL_ASSERT(condition, ...) TORCH_CHECK(condition, #condition)
