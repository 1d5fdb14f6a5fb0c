// SPDX-License-Identifier: BSD-3-Clause
//
// The published schedules over the inner loop of lean_decode_kernel, and variants of the kernel
// itself, for comparison: bfloat16, head_dim up to 128 and up to 8 packed rows, or what they say.
#pragma once

#include "cuda/decode/launch.h"
#include "stamps.h"

namespace tree_attention::ablations {

using cuda::DeviceLimits;
using cuda::Plan;
using cuda::Workspace;

// FlashDecoding: every output in equal splits, and a second kernel that merges them. The splits
// fill the device as if all sequences had `seqlen_k` keys, which is what a host can know.
Plan plan_equal_splits(const DecodeParams& params, const DeviceLimits& limits);
cudaError_t launch_equal_splits(const DecodeParams& params, const Plan& plan,
                                const Workspace& workspace, cudaStream_t stream);

// LeanAttention's fix-up, with lean_decode's plan: the block with an output's first tile waits for
// the other blocks that share it.
cudaError_t launch_waiting_fixup(const DecodeParams& params, const Plan& plan,
                                 const Workspace& workspace, cudaStream_t stream);

// lean_decode with tiles of 64, 128 or 256 keys in a ring of `num_stages`.
Plan plan_tiles(const DecodeParams& params, const DeviceLimits& limits, int tile_keys,
                int num_stages);
cudaError_t launch_tiles(const DecodeParams& params, const Plan& plan, const Workspace& workspace,
                         cudaStream_t stream, int tile_keys);

// lean_decode, with the stamps of each worker. For tiles of 8 or 64 rows of 128 columns, and of 16
// rows of latents.
cudaError_t launch_stamped(const DecodeParams& params, const Plan& plan, const Workspace& workspace,
                           cudaStream_t stream, BlockStamps* stamps);

}  // namespace tree_attention::ablations
