// SPDX-License-Identifier: BSD-3-Clause
//
// Weights and activations lie in memory of just their size, so that sanitizers see a read
// outside of them.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cpu/decode.h"
#include "cpu/kernels.h"
#include "experts/multiply.h"
#include "experts/rows.h"
#include "instruction_sets.h"

namespace {

using tree_attention::DataType;
using tree_attention::ExpertParams;

// Small integers, which every element type has.
template <typename T>
std::vector<T> numbers(int64_t count, int64_t step) {
  std::vector<T> made;
  for (int64_t i = 0; i < count; ++i) made.push_back(static_cast<T>(float((i * step) % 11 - 5)));
  return made;
}

// Rows of whole blocks of int8 in 4 bits, as ExpertParams says.
std::vector<uint8_t> packed(const std::vector<int8_t>& weights) {
  constexpr int64_t kHalf = ExpertParams::kPacked / 2;
  std::vector<uint8_t> bytes(weights.size() / 2);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int8_t* const low = weights.data() + i / kHalf * ExpertParams::kPacked + i % kHalf;
    bytes[i] = static_cast<uint8_t>((low[0] + 8) | (low[kHalf] + 8) << 4);
  }
  return bytes;
}

template <typename X, typename Weight>
void check_products(DataType x_dtype, DataType dtype, int64_t outputs, int64_t inputs,
                    int64_t group_size = 0) {
  // Experts with no row, one row, and several.
  const std::vector<int64_t> begin = {0, 0, 1, 6}, rows = {4, 0, 1, 2, 3, 5};
  const int64_t count = 6, num_experts = 3;
  const auto x = numbers<X>(count * inputs, 3);
  const auto weights = numbers<Weight>(num_experts * outputs * inputs, 7);
  const int64_t groups = group_size == 0 ? 1 : inputs / group_size;
  const std::vector<X> scales(num_experts * outputs * groups, static_cast<X>(0.5f));
  std::vector<X> out(count * outputs, static_cast<X>(NAN));
  const bool is_scaled = dtype == DataType::kInt8;
  std::vector<uint8_t> bytes;
  if constexpr (std::is_same_v<Weight, int8_t>) {
    if (group_size != 0) bytes = packed(weights);
  }
  const void* const own = bytes.empty() ? static_cast<const void*>(weights.data()) : bytes.data();
  tree_attention::cpu::multiply_experts(
      {x_dtype, dtype, x.data(), rows.data(), begin.data(), num_experts, outputs, inputs, own,
       is_scaled ? scales.data() : nullptr, group_size, out.data()});
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    for (int64_t i = begin[expert]; i < begin[expert + 1]; ++i) {
      for (int64_t o = 0; o < outputs; ++o) {
        float sum = 0.0f;
        for (int64_t k = 0; k < inputs; ++k) {
          sum += static_cast<float>(x[i * inputs + k]) *
                 static_cast<float>(weights[(expert * outputs + o) * inputs + k]);
        }
        const float expected = is_scaled ? 0.5f * sum : sum;
        const float found = static_cast<float>(out[rows[i] * outputs + o]);
        CHECK(std::abs(found - expected) <= std::abs(expected) / 128, found, " ", expected);
      }
    }
  }
}

// None but the portable instruction set multiplies with portable vectors. Functions that this CPU
// cannot run may be missing: scripts/sanitize.sh does not compile them.
tree_attention::cpu::MultiplyRows expected_for(const std::string& name) {
  using namespace tree_attention::cpu;
#if defined(__x86_64__)
  if (name == "avx2") return multiply_rows_avx2;
  if (name == "avx512") return multiply_rows_avx512;
  if (name == "avx512_bf16" || name == "amx") return multiply_rows_avx512_bf16;
#elif defined(__aarch64__)
  if (name == "neon" || name == "neon_bf16") return multiply_rows_neon;
#endif
  return multiply_rows_portable;
}

void check_choices() {
  using namespace tree_attention::cpu;
  const std::vector<std::string> names = tree_attention::testing::instruction_sets();
  for (const std::string& name : names) {
    set_instruction_set(name);
    CHECK(rows_multiplied_by(kernels().vectors) == expected_for(name), name);
  }
  set_instruction_set(names.front());
  bool refused = false;
  try {
    rows_multiplied_by(static_cast<Vectors>(99));
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused, "vectors without a kernel");
}

}  // namespace

void test_experts() {
  check_choices();
  for (int threads : {1, 3}) {
    at::set_num_threads(threads);
    for (int64_t outputs : {1, 33}) {
      for (int64_t inputs : {1, 31, 64, 129}) {
        using c10::BFloat16;
        check_products<float, float>(DataType::kFloat32, DataType::kFloat32, outputs, inputs);
        check_products<float, int8_t>(DataType::kFloat32, DataType::kInt8, outputs, inputs);
        check_products<BFloat16, BFloat16>(DataType::kBFloat16, DataType::kBFloat16, outputs,
                                           inputs);
        check_products<BFloat16, int8_t>(DataType::kBFloat16, DataType::kInt8, outputs, inputs);
      }
      for (int64_t group_size : {64, 128}) {
        check_products<float, int8_t>(DataType::kFloat32, DataType::kInt8, outputs, 256,
                                      group_size);
        check_products<c10::BFloat16, int8_t>(DataType::kBFloat16, DataType::kInt8, outputs, 256,
                                              group_size);
      }
    }
  }
}
