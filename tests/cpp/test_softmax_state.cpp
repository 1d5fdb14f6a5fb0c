// SPDX-License-Identifier: BSD-3-Clause
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "common/softmax_state.h"

using tree_attention::Merge;
using tree_attention::merge;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kEmpty = -std::numeric_limits<float>::infinity();

std::string tree(int64_t begin, int64_t end) {
  if (end - begin == 1) return std::to_string(begin);
  int64_t left = 1;
  while (2 * left < end - begin) left *= 2;
  return "(" + tree(begin, begin + left) + " " + tree(begin + left, end) + ")";
}

}  // namespace

void test_merge() {
  for (float lse : {-1e30f, -80.0f, 0.0f, 3.5f, 1e30f}) {
    const Merge left = merge(lse, kEmpty), right = merge(kEmpty, lse);
    CHECK(left.lse == lse && left(2.0f, kNan) == 2.0f, lse);
    CHECK(right.lse == lse && right(kNan, 2.0f) == 2.0f, lse);
    for (float other : {-1e30f, -90.0f, 0.0f, 3.5f, 1e30f}) {
      const Merge both = merge(lse, other);
      CHECK(std::abs(both.weight_a + both.weight_b - 1.0f) <= 1e-7f, lse, " ", other);
      CHECK(both.lse >= std::max(lse, other), lse, " ", other);
      const Merge mirrored = merge(other, lse);
      CHECK(both.lse == mirrored.lse && both.weight_a == mirrored.weight_b, lse, " ", other);
    }
  }
  const Merge none = merge(kEmpty, kEmpty);
  CHECK(none.lse == kEmpty && none(kNan, kNan) == 0.0f, "two empty states");
  CHECK(std::isnan(merge(kNan, 0.0f).lse) && std::isnan(merge(0.0f, kNan)(1.0f, 1.0f)), "NaN");
  CHECK(std::isnan(merge(-kEmpty, 0.0f).lse), "+inf is a producer's fault");
}

void test_canonical_order() {
  for (int64_t num_parts = 1; num_parts <= 130; ++num_parts) {
    std::vector<std::string> parts(num_parts);
    for (int64_t i = 0; i < num_parts; ++i) parts[i] = std::to_string(i);
    tree_attention::merge_in_canonical_order(num_parts, [&](int64_t i, int64_t j) {
      CHECK(i < j, i, " ", j);
      parts[i] = "(" + parts[i] + " " + parts[j] + ")";
    });
    CHECK(parts[0] == tree(0, num_parts), parts[0]);
  }
}
