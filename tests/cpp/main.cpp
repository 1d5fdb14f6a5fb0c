// SPDX-License-Identifier: BSD-3-Clause
//
// The C++ code without torch, run under sanitizers by scripts/sanitize.sh. What the operators
// compute is tested from Python; here memory, arithmetic and synchronisation are watched.
#include <chrono>
#include <cstdio>
#include <exception>

void test_partition();
void test_contributors();
void test_line_with_overhead();
void test_fixup();
void test_fixup_levels();
void test_fixup_threads();
void test_merge();
void test_canonical_order();
void test_merge_states();
void test_lean_decode();
void test_many_workers();
void test_page_out_of_range();
void test_concurrent_calls();

int main() {
  const struct {
    const char* name;
    void (*run)();
  } tests[] = {
      {"partition", test_partition},
      {"contributors", test_contributors},
      {"line with overhead", test_line_with_overhead},
      {"fix-up", test_fixup},
      {"fix-up levels", test_fixup_levels},
      {"fix-up threads", test_fixup_threads},
      {"merge", test_merge},
      {"canonical order", test_canonical_order},
      {"merge_states", test_merge_states},
      {"lean_decode", test_lean_decode},
      {"many workers", test_many_workers},
      {"page out of range", test_page_out_of_range},
      {"concurrent calls", test_concurrent_calls},
  };
  int failures = 0;
  for (const auto& test : tests) {
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
    std::printf("%-20s %s %.1f s\n", test.name, error ? error : "ok", seconds.count());
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}
