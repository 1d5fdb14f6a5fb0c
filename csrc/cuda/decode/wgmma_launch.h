// SPDX-License-Identifier: BSD-3-Clause
//
// The launch of the kernel for Hopper: what launch.h has for the others, and the maps of the
// tensors from which it copies boxes.
#pragma once

#include <cuda.h>

#include "launch.h"

namespace tree_attention::cuda {

// The only argument of the kernel.
struct WgmmaParams {
  LaunchParams launch;
  CUtensorMap keys;
  CUtensorMap values;  // unless they are the first columns of the keys
};

cudaError_t launch_lean_decode_wgmma(const DecodeParams& params, const Plan& plan,
                                     const Workspace& workspace, cudaStream_t stream);

cudaError_t find_resident_blocks_wgmma(const DecodeParams& params, const Plan& plan, int* blocks);

// Defined in lean_decode_wgmma.cuh and instantiated in the files that instances.py writes.
template <typename Element, int kHeadDim>
cudaError_t launch_wgmma_instance(const WgmmaParams& params, const Plan& plan, cudaStream_t stream);

template <typename Element, int kHeadDim>
cudaError_t find_resident_blocks_of_wgmma_instance(const Plan& plan, int* blocks);

}  // namespace tree_attention::cuda
