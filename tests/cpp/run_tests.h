// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>

namespace tree_attention::testing {

struct Test {
  const char* name;
  void (*run)();
};

// Runs the tests, or those that argv names, and returns the status for main.
template <size_t kCount>
int run_tests(const Test (&tests)[kCount], int argc = 1, char** argv = nullptr) {
  int failures = 0, runs = 0;
  for (const Test& test : tests) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    ++runs;
    const auto start = std::chrono::steady_clock::now();
    const char* error = nullptr;
    try {
      test.run();
    } catch (const std::exception& exception) {
      error = "FAILED";
      std::fprintf(stderr, "%s\n", exception.what());
      ++failures;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%-28s %s %.1f s\n", test.name, error ? error : "ok", seconds.count());
    std::fflush(stdout);
  }
  return failures == 0 && runs > 0 ? 0 : 1;
}

}  // namespace tree_attention::testing
