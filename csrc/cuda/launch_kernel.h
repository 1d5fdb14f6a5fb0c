// SPDX-License-Identifier: BSD-3-Clause
//
// The only place with <<<>>> in the library.
#pragma once

#include <cuda_runtime.h>

namespace tree_attention::cuda {

template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned num_blocks, unsigned num_threads,
                          size_t shared_bytes, cudaStream_t stream, const Params& params) {
  // More than 48 KB of dynamic shared memory must be asked for; the carve-out lets as many blocks
  // be resident as the plan counts on. The attributes belong to the kernel on the current device
  // and cost less than a microsecond to set again.
  if (shared_bytes > 48 * 1024) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(shared_bytes));
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared);
    }
    if (error != cudaSuccess) return error;
  }
  kernel<<<num_blocks, num_threads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace tree_attention::cuda
