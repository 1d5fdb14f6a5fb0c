// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>

namespace tree_attention::cpu {

// A message to or from another process, as long where it is sent as where it is received.
struct Message {
  int peer;  // a number of that process
  char* data;
  size_t num_bytes;
};

}  // namespace tree_attention::cpu
