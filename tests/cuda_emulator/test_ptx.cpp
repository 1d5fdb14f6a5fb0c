// SPDX-License-Identifier: BSD-3-Clause
#include <cstdlib>
#include <memory>
#include <vector>

#include "ptx_known_answers.cuh"

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
}
