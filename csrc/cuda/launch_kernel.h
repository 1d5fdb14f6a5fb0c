// SPDX-License-Identifier: BSD-3-Clause
//
// The only place of the library that launches kernels.
#pragma once

#include <cuda_runtime.h>

#include "kernel_loading.h"

namespace tree_attention::cuda {

// `early`: the grid may begin before the one ahead of it in the stream has ended (programmatic
// dependent launch, compute capability 9.0), and waits for that by griddepcontrol_wait, which is
// nothing in code for older devices: that does not begin before.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned num_blocks, unsigned num_threads,
                          size_t shared_bytes, cudaStream_t stream, const Params& params,
                          bool early = false) {
  int ptx_version;
  const cudaError_t error =
      load_kernel(reinterpret_cast<const void*>(kernel), shared_bytes > 48 * 1024, ptx_version);
  if (error != cudaSuccess) return error;
  if (early && ptx_version >= 90) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{num_blocks, num_threads, shared_bytes, stream, &overlap, 1};
    return cudaLaunchKernelEx(&config, kernel, params);
  }
  kernel<<<num_blocks, num_threads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Params>
cudaError_t find_resident_blocks(void (*kernel)(Params), int num_threads, size_t shared_bytes,
                                 int* blocks) {
  int ptx_version;
  const cudaError_t error =
      load_kernel(reinterpret_cast<const void*>(kernel), shared_bytes > 48 * 1024, ptx_version);
  if (error != cudaSuccess) return error;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, num_threads, shared_bytes);
}

}  // namespace tree_attention::cuda
