// SPDX-License-Identifier: BSD-3-Clause
//
// The merge_states kernel against the host's merge, bit for bit.
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "common/softmax_state.h"
#include "cuda/merge/merge_states.cuh"
#include "machine.h"

namespace {

using namespace tree_attention;

// Elements as bits, in the lower half where they have 16.
uint32_t round_to(DataType dtype, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  switch (dtype) {
    case DataType::kFloat32:
      return bits;
    case DataType::kBFloat16:
      return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    default:
      return std::isnan(x) ? 0x7fff : std::bit_cast<uint16_t>(static_cast<_Float16>(x));
  }
}

float value_of(DataType dtype, uint32_t bits) {
  switch (dtype) {
    case DataType::kFloat32:
      return std::bit_cast<float>(bits);
    case DataType::kBFloat16:
      return std::bit_cast<float>(bits << 16);
    default:
      return std::bit_cast<_Float16>(static_cast<uint16_t>(bits));
  }
}

// Memory of elements, NaN where nothing is stored.
class Elements {
 public:
  Elements(DataType dtype, int64_t count) : dtype_(dtype), bytes_(count * size(), 0xff) {}

  void* at(int64_t i) { return bytes_.data() + i * size(); }
  uint32_t bits(int64_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes_.data() + i * size(), size());
    return bits;
  }
  float operator[](int64_t i) const { return value_of(dtype_, bits(i)); }
  void store(int64_t i, float x) {
    const uint32_t bits = round_to(dtype_, x);
    std::memcpy(bytes_.data() + i * size(), &bits, size());
  }

 private:
  int64_t size() const { return dtype_ == DataType::kFloat32 ? 4 : 2; }

  DataType dtype_;
  std::vector<unsigned char> bytes_;
};

// Parts lie in descending order in memory, rows with `gap` elements between them.
void check(int64_t num_parts, int64_t num_rows, int64_t head_dim, DataType dtype,
           DataType out_dtype, int64_t gap, std::mt19937& random) {
  const int64_t row_stride = head_dim + gap, part_stride = num_rows * row_stride;
  Elements o_parts(dtype, num_parts * part_stride), o(out_dtype, num_rows * head_dim);
  std::vector<float> lse_parts(num_parts * num_rows), lse(num_rows, NAN);
  for (int64_t i = 0; i < num_parts * num_rows; ++i) {
    const bool empty = random() % 3 == 0;
    lse_parts[i] = empty           ? -INFINITY
                   : random() % 40 ? std::normal_distribution<float>(0, 5)(random)
                                   : NAN;
    for (int64_t d = 0; d < head_dim && !empty; ++d) {
      o_parts.store(i * row_stride + d, std::normal_distribution<float>()(random));
    }
  }
  const auto part_of = [&](int64_t i) { return num_parts - 1 - i; };
  MergeParams p{};
  p.o_parts = o_parts.at(part_of(0) * part_stride);
  p.lse_parts = lse_parts.data() + part_of(0) * num_rows;
  p.o = o.at(0);
  p.lse = lse.data();
  p.o_stride[0] = -part_stride;
  p.o_stride[1] = row_stride;
  p.lse_stride[0] = -num_rows;
  p.lse_stride[1] = 1;
  p.num_parts = num_parts;
  p.num_rows = num_rows;
  p.head_dim = head_dim;
  p.dtype = dtype;
  p.out_dtype = out_dtype;
  CHECK(cuda::launch_merge_states(p, nullptr) == cudaSuccess, "the launch failed");

  for (int64_t row = 0; row < num_rows; ++row) {
    std::vector<float> row_lse(num_parts), row_o(num_parts * head_dim);
    for (int64_t i = 0; i < num_parts; ++i) {
      row_lse[i] = lse_parts[part_of(i) * num_rows + row];
      for (int64_t d = 0; d < head_dim; ++d) {
        const float value = o_parts[part_of(i) * part_stride + row * row_stride + d];
        row_o[i * head_dim + d] = row_lse[i] == -INFINITY ? 0.0f : value;
      }
    }
    merge_in_canonical_order(num_parts, [&](int64_t i, int64_t j) {
      const Merge merged = merge(row_lse[i], row_lse[j]);
      row_lse[i] = merged.lse;
      for (int64_t d = 0; d < head_dim; ++d) {
        row_o[i * head_dim + d] = merged(row_o[i * head_dim + d], row_o[j * head_dim + d]);
      }
    });
    CHECK(std::memcmp(&lse[row], &row_lse[0], sizeof(float)) == 0, "lse of ", num_parts,
          " parts: ", lse[row], ", not ", row_lse[0]);
    for (int64_t d = 0; d < head_dim; ++d) {
      const bool both_nan = std::isnan(row_o[d]) && std::isnan(o[row * head_dim + d]);
      CHECK(both_nan || o.bits(row * head_dim + d) == round_to(out_dtype, row_o[d]), "o[", row,
            "][", d, "] of ", num_parts, " parts of ", head_dim, " is ", o[row * head_dim + d],
            ", not ", row_o[d]);
    }
  }
}

}  // namespace

void test_merge_states() {
  std::mt19937 random(0);
  const DataType dtypes[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
  const int64_t head_dims[] = {128, 17, 1, 300, 64};
  int seed = 0;
  for (int64_t num_parts = 1; num_parts <= 40; ++num_parts, ++seed) {
    emulator::options() = {static_cast<uint64_t>(seed), 1 + seed % 3};
    check(num_parts, 1 + seed % 6, head_dims[seed % 5], dtypes[seed % 3], dtypes[seed / 3 % 3],
          seed % 2, random);
  }
  for (int64_t num_parts : {64, 65, 127, 1000, 5003}) {
    check(num_parts, 3, 33, DataType::kFloat32, DataType::kFloat32, 5, random);
  }
  check(1, 50, 8, DataType::kFloat32, DataType::kFloat32, 0, random);
  check(3, 0, 64, DataType::kFloat32, DataType::kFloat32, 0, random);
}
