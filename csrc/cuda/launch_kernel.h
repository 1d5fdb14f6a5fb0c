// SPDX-License-Identifier: BSD-3-Clause
//
// The only place with <<<>>> in the library.
#pragma once

#include <cuda_runtime.h>

#include "kernel_loading.h"

namespace tree_attention::cuda {

template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned num_blocks, unsigned num_threads,
                          size_t shared_bytes, cudaStream_t stream, const Params& params) {
  const cudaError_t error =
      load_kernel(reinterpret_cast<const void*>(kernel), shared_bytes > 48 * 1024);
  if (error != cudaSuccess) return error;
  kernel<<<num_blocks, num_threads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Params>
cudaError_t find_resident_blocks(void (*kernel)(Params), int num_threads, size_t shared_bytes,
                                 int* blocks) {
  const cudaError_t error =
      load_kernel(reinterpret_cast<const void*>(kernel), shared_bytes > 48 * 1024);
  if (error != cudaSuccess) return error;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, num_threads, shared_bytes);
}

}  // namespace tree_attention::cuda
