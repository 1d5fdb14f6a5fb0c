// SPDX-License-Identifier: BSD-3-Clause
//
// The bridge from the operator to the kernel: the only CUDA file of one_shot that sees torch.
#include <ATen/cuda/CUDAContext.h>

#include "checks.h"
#include "one_shot_args.h"

namespace tree_attention {

void cuda::launch_one_shot(OneShotParams& params) {
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  check_capability("one_shot", device.name, device.major, device.minor);
  void* host = nullptr;
  // Also where the memory is not page-locked, which a kernel could not reach.
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&host, params.host, 0));
  params.host = static_cast<OneShotHost*>(host);
  C10_CUDA_CHECK(launch_one_shot(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace tree_attention
