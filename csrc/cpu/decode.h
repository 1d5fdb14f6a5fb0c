// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include "common/decode_params.h"

namespace tree_attention::cpu {

// Exact attention over the keys of params.key_ranges. Results depend on params and on the
// instruction set; with params.num_workers > 0 they do not depend on the number of threads.
void lean_decode(const DecodeParams& params);

// Refuses, as lean_decode does, page ids that do not exist.
void check_decode(const DecodeParams& params);

// The instruction set in use: the widest that this machine has, unless set otherwise.
const char* instruction_set();

// Selects another one for the whole process; throws std::invalid_argument, listing what this
// machine supports, for anything else.
void set_instruction_set(const std::string& name);

}  // namespace tree_attention::cpu
