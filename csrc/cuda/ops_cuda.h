// SPDX-License-Identifier: BSD-3-Clause
//
// The operators' entry points on CUDA, on the current stream of the current device. The host waits
// for nothing.
#pragma once

#include "common/merge_params.h"
#include "decode/launch.h"
#include "one_shot/one_shot.cuh"

namespace tree_attention::cuda {

void lean_decode(const DecodeParams& params);

void merge_states(const MergeParams& params);

// params.host is an address of the host's; the kernel gets the device's address of that memory.
void launch_one_shot(OneShotParams& params);

using PlanFunction = Plan (*)(const DecodeParams&, const DeviceLimits&);
using LaunchFunction = cudaError_t (*)(const DecodeParams&, const Plan&, const Workspace&,
                                       cudaStream_t);

// What lean_decode is for any pair of these: checks what CUDA supports, then plans and launches.
void launch_planned(const DecodeParams& params, PlanFunction make_plan, LaunchFunction launch);

}  // namespace tree_attention::cuda
