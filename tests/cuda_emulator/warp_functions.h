// SPDX-License-Identifier: BSD-3-Clause
//
// Shuffles and votes.
#pragma once

#include <bit>
#include <cstring>
#include <source_location>

#include "machine.h"

namespace tree_attention::emulator {

// Kernels call functions of a warp with all of its lanes.
inline void require_full_mask(unsigned mask, const std::source_location& where) {
  if (mask != 0xffffffff) fail("a mask that leaves lanes out", where);
}

// source_lane(lane, argument, width) is the lane that `lane` gets its value from.
template <typename T>
T shuffle(const char* name, unsigned mask, T value, int argument, int width,
          const std::source_location& where, int (*source_lane)(int, int, int)) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  require_full_mask(mask, where);
  struct Operands {
    uint64_t value, result;
    int argument, width;
    int (*source_lane)(int, int, int);
  } operands{0, 0, argument, width, source_lane};
  std::memcpy(&operands.value, &value, sizeof(T));
  warp_function(
      name, &operands,
      [](void* const(&all)[kWarpSize]) {
        for (int lane = 0; lane < kWarpSize; ++lane) {
          Operands& o = *static_cast<Operands*>(all[lane]);
          const int source = o.source_lane(lane, o.argument, o.width);
          o.result = static_cast<Operands*>(all[source])->value;
        }
      },
      where);
  std::memcpy(&value, &operands.result, sizeof(T));
  return value;
}

inline int any(unsigned mask, int predicate, const std::source_location& where) {
  require_full_mask(mask, where);
  warp_function(
      "__any_sync", &predicate,
      [](void* const(&all)[kWarpSize]) {
        bool any = false;
        for (void* predicate : all) any = any || *static_cast<int*>(predicate) != 0;
        for (void* predicate : all) *static_cast<int*>(predicate) = any;
      },
      where);
  return predicate;
}

}  // namespace tree_attention::emulator
