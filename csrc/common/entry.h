// SPDX-License-Identifier: BSD-3-Clause
//
// The total order of chosen keys: NaN first, then score down, slot up. A score and its slot are one
// integer, and larger integers come first. -0 is 0, and entries of different slots are never equal.
#pragma once

#include <cstdint>
#include <cstring>

namespace tree_attention {

using Entry = uint64_t;

constexpr Entry kNoEntry = 0;  // comes last; no score has it, -inf neither
constexpr uint32_t kOrderOfNan = 0xffffffffu;
constexpr uint32_t kLargestSlot = 0x7fffffffu;

inline uint32_t order_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  if (score != score) return kOrderOfNan;
  if (score == 0) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline Entry entry_of(float score, int32_t slot) {
  return static_cast<Entry>(order_of(score)) << 32 | (kLargestSlot - static_cast<uint32_t>(slot));
}

inline float score_of(Entry entry) {
  const uint32_t order = static_cast<uint32_t>(entry >> 32);
  const uint32_t bits = order == kOrderOfNan  ? 0x7fc00000u
                        : order & 0x80000000u ? order ^ 0x80000000u
                                              : ~order;
  float score;
  std::memcpy(&score, &bits, sizeof(score));
  return score;
}

inline int32_t slot_of(Entry entry) {
  return static_cast<int32_t>(kLargestSlot - static_cast<uint32_t>(entry));
}

}  // namespace tree_attention
