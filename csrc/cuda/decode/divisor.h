// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace tree_attention::cuda {

// Division of 31-bit numbers by one divisor as a multiplication and a shift (Granlund and
// Montgomery, 1994): with 2^(l-1) < d <= 2^l and m = ceil(2^(31+l) / d), m d exceeds 2^(31+l) by
// less than 2^l, which is too little to change the quotient of an n below 2^31.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  static Divisor of(uint32_t divisor) {
    uint32_t shift = 31;
    while (uint64_t{1} << (shift - 31) < divisor) ++shift;
    const uint64_t multiplier = ((uint64_t{1} << shift) + divisor - 1) / divisor;
    return {divisor, static_cast<uint32_t>(multiplier), shift};
  }

  TREE_ATTENTION_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> shift);
  }
};

}  // namespace tree_attention::cuda
