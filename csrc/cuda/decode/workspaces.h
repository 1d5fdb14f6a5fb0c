// SPDX-License-Identifier: BSD-3-Clause
//
// Scratch memory of launches. Each stream on which launches are under way has one workspace, since
// launches on one stream follow each other, and so has each captured graph, since graphs may be
// replayed on any streams. Its size does not depend on the length of the context.
#pragma once

#include <mutex>

#include "launch.h"

namespace tree_attention::cuda {

// A workspace for one launch, which is to be made before this ends: until then nothing on the
// stream tells others that it is in use.
struct LeasedWorkspace {
  Workspace workspace;
  std::unique_lock<std::mutex> lock;
};

// The workspace of `stream`, a stream of the current device, at least of size `needed`. A call
// first looks for one that was left by an ended graph, or by a stream that `lives` and has nothing
// to do. If it finds none, it allocates memory for the largest launch of the device; so does a call
// that asks for more blocks than are resident. A capture gets what its launches need. None of it is
// ever freed, as a launch may be under way, nor does it come from torch's allocator, and allocating
// it does not disturb a capture. `lives`: the stream is never destroyed, and not the default one.
LeasedWorkspace workspace_of(cudaStream_t stream, bool lives, const DeviceLimits& limits,
                             const WorkspaceSize& needed);

// Waits for all devices that have workspaces and zeroes the counters. To be called after a launch
// that was aborted, which leaves them at any value.
void reset_workspaces();

}  // namespace tree_attention::cuda
