// SPDX-License-Identifier: BSD-3-Clause
//
// The kernel with the published schedules in the place of its own, for benchmarks only: bf16,
// head_dim 64 and 128, up to 16 packed rows.
#pragma once

#include "launch.h"

namespace tree_attention::cuda {

// FlashDecoding: every output in equal splits, and a second kernel that merges them. The splits
// fill the device as if all sequences had `seqlen_k` keys, which is what a host can know.
Plan plan_equal_splits(const DecodeParams& params, const DeviceLimits& limits);
cudaError_t launch_equal_splits(const DecodeParams& params, const Plan& plan,
                                const Workspace& workspace, cudaStream_t stream);

// LeanAttention's fix-up, with lean_decode's plan.
cudaError_t launch_waiting_fixup(const DecodeParams& params, const Plan& plan,
                                 const Workspace& workspace, cudaStream_t stream);

}  // namespace tree_attention::cuda
