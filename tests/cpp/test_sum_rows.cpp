// SPDX-License-Identifier: BSD-3-Clause
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/converting.h"
#include "cpu/sum_rows.h"

using tree_attention::BFloat16;
using tree_attention::DataType;
using tree_attention::cpu::Converting;
using tree_attention::cpu::sum_rows;

namespace {

// Sums of 1 to 4 rows, the last of which takes the sum, as messages end: rows begin anywhere.
template <typename Element>
void test_sums(DataType dtype, int64_t count) {
  using Number = typename Converting<Element>::type;
  std::mt19937 random(static_cast<unsigned>(count));
  std::normal_distribution<float> normal;
  for (int num_rows = 1; num_rows <= 4; ++num_rows) {
    const size_t stride = count + 8 / sizeof(Number);
    std::vector<Number> memory(num_rows * stride);
    for (Number& x : memory) x = Number(std::ldexp(normal(random), int(random() % 20)));
    if (count > 2) {
      memory[0] = Number(-0.0f);
      memory[1] = Number(std::numeric_limits<float>::quiet_NaN());
      memory[2] = Number(std::numeric_limits<float>::infinity());
    }
    std::vector<Number> expected(count);
    std::vector<const void*> rows;
    for (int row = 0; row < num_rows; ++row) rows.push_back(&memory[row * stride]);
    for (int64_t i = 0; i < count; ++i) {
      float total = static_cast<float>(memory[i]);
      for (int row = 1; row < num_rows; ++row) {
        total += static_cast<float>(memory[row * stride + i]);
      }
      expected[i] = Number(total);
    }
    Number* out = &memory[(num_rows - 1) * stride];
    sum_rows(rows, count, dtype, out);
    for (int64_t i = 0; i < count; ++i) {
      const bool same = std::memcmp(&out[i], &expected[i], sizeof(Number)) == 0;
      const bool both_nan =
          std::isnan(static_cast<float>(out[i])) && std::isnan(static_cast<float>(expected[i]));
      CHECK(same || both_nan, num_rows, " rows of ", count, ": number ", i);
    }
  }
}

}  // namespace

void test_sum_rows() {
  for (const int64_t count : {0, 1, 7, 2047, 2049, 100'003}) {
    test_sums<float>(DataType::kFloat32, count);
    test_sums<BFloat16>(DataType::kBFloat16, count);
  }
}
