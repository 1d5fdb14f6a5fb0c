// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/decode.h"

namespace tree_attention::testing {

// Those of this CPU, from the widest. The list is in the message for a name that does not exist.
inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  try {
    cpu::set_instruction_set("none");
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what(), before = "must be one of ";
    std::istringstream list(text.substr(text.find(before) + before.size()));
    for (std::string name; std::getline(list >> std::ws, name, ',') && name != "got none";) {
      names.push_back(name);
    }
  }
  return names;
}

}  // namespace tree_attention::testing
