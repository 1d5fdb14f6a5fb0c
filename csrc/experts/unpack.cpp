// SPDX-License-Identifier: BSD-3-Clause
#include "experts/unpack.h"

#include "cpu/converting.h"
#include "cpu/multiversioned.h"
#include "cpu/parallel.h"
#include "experts/params.h"

namespace tree_attention::cpu {
namespace {

constexpr int64_t kBlock = ExpertParams::kPacked, kHalf = kBlock / 2;

MULTIVERSIONED void unpack_block(const uint8_t* packed, float scale, float* out) {
  for (int64_t j = 0; j < kHalf; ++j) {
    out[j] = scale * static_cast<float>((packed[j] & 15) - 8);
    out[kHalf + j] = scale * static_cast<float>((packed[j] >> 4) - 8);
  }
}

}  // namespace

void unpack(const uint8_t* packed, const void* scales, DataType dtype, int64_t rows, int64_t inputs,
            int64_t group_size, void* out) {
  const int64_t blocks = inputs / kBlock, blocks_of_scale = group_size / kBlock;
  with_dtype(dtype, [&]<typename T>() {
    using Value = typename Converting<T>::type;
    parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin * blocks; block < end * blocks; ++block) {
        float numbers[kBlock];
        const auto scale = static_cast<const Value*>(scales)[block / blocks_of_scale];
        unpack_block(packed + block * kHalf, static_cast<float>(scale), numbers);
        Value* const to = static_cast<Value*>(out) + block * kBlock;
        for (int64_t i = 0; i < kBlock; ++i) to[i] = static_cast<Value>(numbers[i]);
      }
    });
  });
}

}  // namespace tree_attention::cpu
