// SPDX-License-Identifier: BSD-3-Clause
//
// A number that tells tensors apart: ranks compare their queries by it in every exchange.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tree_attention::cpu {

// Eight lanes of xor, multiplication and shift, so that multiplications do not wait for one
// another: 8 KiB take half a microsecond. Not made to resist somebody who looks for
// equal digests.
class Digest {
 public:
  static constexpr int kLanes = 8;
  static constexpr size_t kBlockBytes = kLanes * sizeof(uint64_t);

  // The same for bytes that come in several calls if all but the last bring whole blocks.
  void add(const char* bytes, size_t count);
  uint64_t value() const;

 private:
  uint64_t lanes_[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
};

}  // namespace tree_attention::cpu
