// SPDX-License-Identifier: BSD-3-Clause
#include <random>

#include "check.h"
#include "cuda/decode/divisor.h"

using tree_attention::cuda::Divisor;

namespace {

constexpr uint32_t kMax = 0x7fffffff;

// Numbers around the multiples of a divisor, where a product that is too small or large shows.
void check(uint32_t d, uint32_t multiple) {
  const Divisor divisor = Divisor::of(d);
  CHECK(divisor.divisor == d, d);
  for (int64_t n = int64_t{multiple} * d - 1; n <= int64_t{multiple} * d + 1; ++n) {
    if (n < 0 || n > kMax) continue;
    CHECK(divisor.quotient(static_cast<uint32_t>(n)) == static_cast<uint64_t>(n) / d, n, " / ", d);
  }
}

}  // namespace

void test_divisor() {
  std::mt19937 random(0);
  for (uint32_t d = 1; d <= 3000; ++d) {
    for (uint32_t multiple = 0; multiple < 100; ++multiple) check(d, multiple);
    for (int i = 0; i < 100; ++i) check(d, random() % (kMax / d) + 1);
    check(d, kMax / d);
  }
  for (int bits = 1; bits <= 31; ++bits) {
    for (int64_t d = (int64_t{1} << bits) - 2; d <= (int64_t{1} << bits) + 2; ++d) {
      if (d < 1 || d > kMax) continue;
      for (const uint32_t multiple : {0u, 1u, 2u, kMax / static_cast<uint32_t>(d)}) {
        check(static_cast<uint32_t>(d), multiple);
      }
    }
  }
  for (int i = 0; i < 1'000'000; ++i) {
    const uint32_t d = (random() & kMax) >> random() % 31 | 1, n = random() & kMax;
    CHECK(Divisor::of(d).quotient(n) == n / d, n, " / ", d);
  }
}
