// SPDX-License-Identifier: BSD-3-Clause
//
// Scratch memory of launches. Each device and stream has one workspace, since launches on one
// stream follow each other. Its size does not depend on the length of the context.
#pragma once

#include "launch.h"

namespace tree_attention::cuda {

// The workspace of `stream`, a stream of the current device, at least of size `needed`. Memory is
// allocated by the first call, for the largest launch of the device, and by one that asks for more
// blocks than are resident. It is never freed, since captured graphs keep its address; for their
// sake it does not come from torch's allocator either, and allocating it does not disturb a
// capture.
Workspace workspace_of(cudaStream_t stream, const DeviceLimits& limits,
                       const WorkspaceSize& needed);

// Waits for all devices that have workspaces and zeroes the counters. To be called after a launch
// that was aborted, which leaves them at any value.
void reset_workspaces();

}  // namespace tree_attention::cuda
