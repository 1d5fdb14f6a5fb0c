// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace tree_attention::emulator {

// splitmix64: the same numbers everywhere, so that a seed repeats a failure.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t below(uint32_t bound) {
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
    return static_cast<uint32_t>(((x >> 32) * bound) >> 32);
  }

 private:
  uint64_t state_;
};

}  // namespace tree_attention::emulator
