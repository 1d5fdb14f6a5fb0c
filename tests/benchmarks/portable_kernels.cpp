// SPDX-License-Identifier: BSD-3-Clause
//
// In the place of instruction_set.cpp, for programs that are to compile fast: one set of kernels.
#include "cpu/kernel/decode_kernel.h"

const tree_attention::cpu::Kernels& tree_attention::cpu::kernels() { return portable_kernels; }
