// SPDX-License-Identifier: BSD-3-Clause
#include <cstdlib>
#include <memory>
#include <vector>

#include "ptx_known_answers.cuh"
#include "tensor_core.h"

namespace {

std::vector<std::unique_ptr<char[]>> allocations;

void* allocate(size_t bytes) {
  allocations.push_back(std::make_unique<char[]>(bytes));
  return allocations.back().get();
}

}  // namespace

void test_ptx() {
  for (int seed = 0; seed < 5; ++seed) {
    tree_attention::emulator::options() = {static_cast<uint64_t>(seed), 2 + seed};
    tree_attention::testing::test_known_answers({allocate, [] {}});
  }
  allocations.clear();
  // The emulated device has no such instruction, but nvcc's PTX that is run on it has.
  std::vector<uint32_t> of_float8(256);
  for (uint32_t i = 0; i < 256; ++i) {
    const auto bytes = static_cast<uint16_t>(i << 8 | (i + 255) % 256);
    of_float8[i] = tree_attention::cuda::cvt_f16x2_e4m3x2(bytes);
  }
  tree_attention::testing::check_float8(of_float8.data());
}

// Sums by which the published measurements tell the devices apart.
void test_tensor_cores() {
  using tree_attention::emulator::add_products;
  using tree_attention::emulator::kA100;
  using tree_attention::emulator::kH100;
  using tree_attention::emulator::TensorCore;
  // c + `count` times `product`, each `distance` behind the one before.
  const auto sum = [](const TensorCore& core, float c, float product, int count, int distance = 1) {
    float a[16] = {}, b[16] = {};
    for (int i = 0; i < count; ++i) {
      a[i * distance] = 0x1p10f * product;
      b[i * distance] = 0x1p-10f;
    }
    for (int k = 0; k < 16; k += core.block) c = add_products(core, c, a + k, b + k);
    return c;
  };
  constexpr float kUlp = 0x1p-23f;  // of 1
  for (const TensorCore& core : {kA100, kH100}) {
    for (const float sign : {1.0f, -1.0f}) {
      CHECK(sum(core, sign, sign * 0.75f * kUlp, 1) == sign, "the sum is not cut off");
      CHECK(sum(core, sign, sign * 0.75f * kUlp, 2) == sign * (1 + kUlp), "extra places are lost");
      CHECK(sum(core, sign, -sign * 0.125f * kUlp, 1) == sign, "places beyond the extra ones");
    }
    CHECK(sum(core, 0.0f, 3.0f * kUlp, 16) == 48.0f * kUlp, "without an accumulator");
    CHECK(sum(core, 0.0f, 0.0f, 16) == 0.0f, "not zero");
    CHECK(std::isinf(sum(core, 1.0f, INFINITY, 1)), "finite");
    CHECK(std::isnan(sum(core, NAN, 1.0f, 1)), "a number");
  }
  CHECK(sum(kA100, 1.0f, 0.5f * kUlp, 16) == 1 + 8 * kUlp, "half a unit");
  CHECK(sum(kA100, 1.0f, 0.25f * kUlp, 16) == 1.0f, "a quarter of a unit");
  CHECK(sum(kH100, 1.0f, 0.25f * kUlp, 16) == 1 + 4 * kUlp, "a quarter of a unit");
  CHECK(sum(kH100, 1.0f, 0.125f * kUlp, 16) == 1.0f, "an eighth of a unit");
  // Two halves in different blocks of eight are each cut off.
  CHECK(sum(kA100, 1.0f, 0.5f * kUlp, 2, 8) == 1.0f, "one block of 16");
  CHECK(sum(kH100, 1.0f, 0.5f * kUlp, 2, 8) == 1 + kUlp, "two blocks of 8");
}
