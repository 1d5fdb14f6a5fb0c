// SPDX-License-Identifier: BSD-3-Clause
//
// The bridge from the operator to the kernel: the only CUDA file of merge_states that sees torch.
#include <ATen/cuda/CUDAContext.h>

#include "../merge_states.h"
#include "checks.h"
#include "merge_states.cuh"

namespace tree_attention {

void cuda::merge_states(const MergeParams& params) {
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  check_capability("merge_states", device.name, device.major, device.minor);
  C10_CUDA_CHECK(launch_merge_states(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace tree_attention
