// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <sstream>
#include <stdexcept>

#define CHECK(condition, ...) \
  ((condition) ? void() : ::check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__))

template <typename... Parts>
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const Parts&... parts) {
  std::ostringstream message;
  message << file << ':' << line << ": " << condition << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}
