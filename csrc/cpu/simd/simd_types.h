// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace tree_attention::cpu {

// Storage formats; arithmetic is always float32.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace tree_attention::cpu
