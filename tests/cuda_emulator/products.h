// SPDX-License-Identifier: BSD-3-Clause
//
// Products that four warps issue together, and that run while these go on (wgmma). Each warp has
// its own 16 rows of them: the four do not wait for one another. Until a wait covers a product its
// accumulators are NaN; a and b are read at some time between the issue and the wait.
#pragma once

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
  bool bf16;          // false: float16
  int count;          // number of accumulators in a thread
  bool transposed_a;  // a has a row for each k
  uint64_t a, b;      // descriptors

  bool operator==(const Product&) const = default;
};

// A matrix in shared memory, "swizzle of 128 bytes": PTX ISA 9.0, 9.7.15.5.1.2.
struct Matrix {
  uint32_t begin, leading, stride;
  bool transposed;

  // Where row `row` (m or n) has its eight elements from k on; of a transposed matrix, where row k
  // has eight of m from `row` on.
  uint32_t chunk(int row, int k) const {
    const uint32_t linear =
        transposed ? begin + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                   : begin + row / 8 * stride + row % 8 * 128 + k * 2;
    return linear ^ (linear >> 7 & 7) << 4;
  }
};

Matrix matrix_of(uint64_t descriptor, bool transposed, const std::source_location& where);

// Where accumulator i of a thread of the four warps is in d.
struct Place {
  int row, column;

  bool operator==(const Place&) const = default;
};
constexpr Place place_of(int thread, int i) {
  return {thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2};
}

// The products of a warp that are under way.
struct Products {
  struct Issued {
    Product product;
    std::vector<float*> d;                     // accumulators, [lane, count]
    std::shared_ptr<std::vector<float>> sums;  // in d at the end; several products may add to them
    std::source_location where;
  };

  std::deque<Issued> issued;
  size_t num_done = 0;             // the first so many of `issued` are computed
  std::vector<size_t> group_ends;  // of each group: how many of `issued` end with it
  bool fenced = false;   // wgmma_fence was called since a thread may have touched registers
  size_t num_steps = 0;  // that this warp has issued, in ProductLog
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
