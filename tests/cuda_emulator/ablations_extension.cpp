// SPDX-License-Identifier: BSD-3-Clause
//
// The ablations' operators for CPU tensors, on the emulated device.
#include <vector>

#include "benchmarks/cuda/ablations/ops.cpp"
#include "machine.h"

namespace tree_attention {

cuda::LeasedWorkspace cuda::workspace_of(cudaStream_t, bool, const DeviceLimits&,
                                         const WorkspaceSize& size) {
  static std::vector<uint32_t> counters;
  static std::vector<float> partials;
  counters.assign(size.num_counters, 0);
  partials.assign(size.num_partial_floats, NAN);
  return {{counters.data(), partials.data()}, {}};
}

namespace ablations {

TORCH_LIBRARY_IMPL(tree_attention_ablations, CPU, m) {
  // All blocks are resident, or the waiting fix-up might wait for ever.
  emulator::options() = {0, 1 << 10};
  m.impl("equal_splits", Ablation<plan_equal_splits, launch_equal_splits>::run);
  m.impl("waiting_fixup", Ablation<cuda::plan_lean_decode, launch_waiting_fixup>::run);
  m.impl("stamped", Stamped::run);
  for_each_tile([&](const std::string& name, auto run) { m.impl(name.c_str(), run); });
}

}  // namespace ablations
}  // namespace tree_attention
