// SPDX-License-Identifier: BSD-3-Clause
//
// Scratch memory of launches. Each stream of a device has one workspace, since launches on one
// stream follow each other, and so has each captured graph, since graphs may be replayed on any
// streams. Its size does not depend on the length of the context.
#pragma once

#include "launch.h"

namespace tree_attention::cuda {

// The workspace of `stream`, a stream of the current device, at least of size `needed`. Memory of a
// stream is allocated by the first call, for the largest launch of the device, and by one that asks
// for more blocks than are resident. A capture gets what its launches need, and the next ones get
// that when its graph is destroyed. None of it is ever freed, as a launch may be under way, nor
// does it come from torch's allocator, and allocating it does not disturb a capture.
Workspace workspace_of(cudaStream_t stream, const DeviceLimits& limits,
                       const WorkspaceSize& needed);

// Waits for all devices that have workspaces and zeroes the counters. To be called after a launch
// that was aborted, which leaves them at any value.
void reset_workspaces();

}  // namespace tree_attention::cuda
