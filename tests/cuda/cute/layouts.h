// SPDX-License-Identifier: BSD-3-Clause
//
// What CuTe says of wgmma's operands, for check_layouts.cpp, which cannot include CuTe itself:
// CuTe's headers and the emulated device's have names in common.
#pragma once

#include <cstdint>
#include <functional>

namespace tree_attention::testing {

// A tile of 16-bit elements in shared memory, in boxes of 64 columns, of which each product takes
// 16 of k.
struct CuteTile {
  bool transposed;  // a box has a row for each k
  int rows;         // of the product: m or n
  int size_k;
  std::function<int(int row, int k)> byte;       // where it has an element, from its begin
  std::function<uint64_t(int step)> descriptor;  // of a tile that begins at 0
};
void visit_cute_tiles(const std::function<void(const CuteTile&)>& visit);

// Of all products: the row and the column, times 64, of accumulator i of a thread.
void visit_cute_fragments(const std::function<void(int thread, int i, int place)>& visit);

}  // namespace tree_attention::testing
