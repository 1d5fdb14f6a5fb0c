// SPDX-License-Identifier: BSD-3-Clause
//
// Products that four warps issue together and that run beside them (wgmma). Each warp has its own
// 16 rows of them: the four do not wait for one another. Until a wait covers a product its
// accumulators are NaN; a and b are read at some time between the issue and the wait.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <source_location>
#include <vector>

namespace tree_attention::emulator {

struct Block;
struct Warp;

// The operands that all threads of the four warps have in common.
struct Product {
  bool bf16;          // or float16
  int count;          // accumulators of a thread
  bool transposed_a;  // in shared memory
  bool a_in_registers;
  uint64_t a, b;  // descriptors
  bool accumulate;

  bool operator==(const Product&) const = default;
};

// The products of a warp that are under way.
struct Products {
  struct Issued {
    Product product;
    std::vector<float*> d;                      // [lane, count]
    std::shared_ptr<std::vector<float>> sums;   // of these, which several products may add to
    std::array<std::array<uint32_t, 4>, 32> a;  // [lane], if in registers
    std::source_location where;
  };

  std::deque<Issued> issued;
  size_t num_done = 0;             // of them
  std::vector<size_t> group_ends;  // numbers of products
  bool fenced = false;             // since a thread may have touched registers
  size_t num_steps = 0;            // of the log below
};

// What the warps of a warpgroup have issued, which must be the same in all four.
struct ProductLog {
  struct Step {
    const char* name;
    Product product;

    bool operator==(const Step&) const = default;
  };
  std::vector<Step> steps;
};

// Computes the oldest product of a warp that has not been computed.
void do_product(Warp& warp);
// Fails where the warps of a warpgroup have not issued the same.
void require_equal_products(const Block& block);

}  // namespace tree_attention::emulator
