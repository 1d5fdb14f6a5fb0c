// SPDX-License-Identifier: BSD-3-Clause
//
// That csrc/cuda/matrix_descriptor.cuh and the emulated device read wgmma's operands as CuTe does.
#include <cstdio>
#include <exception>

#include "check.h"
#include "cuda/device.h"
#include "cuda/matrix_descriptor.cuh"
#include "layouts.h"
#include "products.h"

namespace tree_attention::testing {
namespace {

// The field of the distance between boxes side by side, which a product of one box does not use.
uint64_t unused_field(const CuteTile& tile) { return tile.transposed ? uint64_t{0x3fff} << 16 : 0; }

int num_elements = 0;

void check_tile(const CuteTile& tile) {
  for (int step = 0; step < tile.size_k / 16; ++step) {
    const uint32_t begin = step * (tile.transposed ? 16 * cuda::kBoxRowBytes : 2 * 16);
    const uint64_t ours = cuda::matrix_descriptor(begin), theirs = tile.descriptor(step);
    const uint64_t mask = ~unused_field(tile);
    CHECK((ours & mask) == (theirs & mask), std::hex, "descriptor ", ours, ", not ", theirs,
          std::dec, ", rows ", tile.rows, ", step ", step);
    const emulator::Matrix matrix = emulator::matrix_of(ours, tile.transposed, {});
    for (int row = 0; row < tile.rows; ++row) {
      for (int i = 0; i < 16; ++i, ++num_elements) {
        const int k = 16 * step + i, byte = tile.byte(row, k);
        const uint32_t read = tile.transposed ? matrix.chunk(row / 8 * 8, i) + row % 8 * 2
                                              : matrix.chunk(row, i / 8 * 8) + i % 8 * 2;
        const int written =
            tile.transposed ? cuda::swizzled(k, 2 * row) : cuda::swizzled(row, 2 * k);
        CHECK(static_cast<int>(read) == byte && written == byte, "row ", row, ", k ", k,
              " is read at ", read, ", written at ", written, ", not ", byte);
      }
    }
  }
}

void check_place(int thread, int i, int place) {
  const emulator::Place ours = emulator::place_of(thread, i);
  CHECK(ours == (emulator::Place{place % 64, place / 64}), "thread ", thread, ", ", i, ": row ",
        ours.row, ", column ", ours.column, ", not ", place % 64, ", ", place / 64);
  ++num_elements;
}

}  // namespace
}  // namespace tree_attention::testing

int main() {
  using namespace tree_attention::testing;
  try {
    visit_cute_tiles(check_tile);
    visit_cute_fragments(check_place);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("%d elements\n", num_elements);
  return 0;
}
