// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "launch.h"

namespace tree_attention::cuda {

using PlanFunction = Plan (*)(const DecodeParams&, const DeviceLimits&);
using LaunchFunction = cudaError_t (*)(const DecodeParams&, const Plan&, const Workspace&,
                                       cudaStream_t);

// Checks what CUDA supports, then plans and launches on the current stream of the current device.
void launch_planned(const DecodeParams& params, PlanFunction make_plan, LaunchFunction launch);

// On the current stream of the current device; the host waits for nothing.
void lean_decode(const DecodeParams& params);

}  // namespace tree_attention::cuda
