// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/digest.h"

#include <algorithm>
#include <cstring>

namespace tree_attention::cpu {

namespace {

// The fraction of the golden ratio in 64 bits, which is odd.
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15;

// The shift brings the highest bits, which change few bits of a product, to where they change many.
uint64_t mixed(uint64_t lane, uint64_t word) {
  const uint64_t product = (lane ^ word) * kMultiplier;
  return product ^ (product >> 29);
}

}  // namespace

void Digest::add(const char* bytes, size_t count) {
  // In registers: `bytes` might point at the members.
  uint64_t lanes[kLanes], words[kLanes];
  std::copy_n(lanes_, kLanes, lanes);
  for (; count >= sizeof words; bytes += sizeof words, count -= sizeof words) {
    std::memcpy(words, bytes, sizeof words);
    for (int i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], words[i]);
  }
  for (int i = 0; count > 0; ++i) {
    const size_t part = std::min(count, sizeof(uint64_t));
    uint64_t word = 0;
    std::memcpy(&word, bytes, part);
    lanes[i] = mixed(lanes[i], word);
    bytes += part, count -= part;
  }
  std::copy_n(lanes, kLanes, lanes_);
}

uint64_t Digest::value() const {
  uint64_t result = 0;
  for (const uint64_t lane : lanes_) result = mixed(result, lane);
  return result;
}

}  // namespace tree_attention::cpu
