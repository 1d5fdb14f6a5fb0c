// SPDX-License-Identifier: BSD-3-Clause
//
// lean_decode with the kernels of AMX on emulated tiles: from the time of install() on, it takes
// the place of the CPU's. The rest of csrc/cpu is compiled a second time, beside that of the
// extension.
#include <torch/library.h>

#include <memory>

#include "cpu/decode.h"
#include "cpu/kernels.h"
#include "cpu/merge.h"
#include "cpu/ranges.h"
#include "operators.h"

namespace tree_attention {

namespace cpu {
const Kernels& kernels() { return amx_kernels; }
}  // namespace cpu

namespace {

// While it exists, its kernels hide those that were registered before.
std::unique_ptr<torch::Library> library;

void install() {
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "tree_attention",
                                             c10::DispatchKey::CPU, __FILE__, __LINE__);
  using Operator = LeanDecode<cpu::lean_decode, cpu::merge_states, cpu::split_ranges>;
  library->impl("lean_decode", Operator::run);
  library->impl("lean_decode.out", Operator::run_out);
}

void uninstall() { library.reset(); }

}  // namespace

TORCH_LIBRARY(tree_attention_amx_emulator, m) {
  m.def("install", install);
  m.def("uninstall", uninstall);
}

}  // namespace tree_attention
