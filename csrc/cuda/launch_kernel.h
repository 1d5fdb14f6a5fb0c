// SPDX-License-Identifier: BSD-3-Clause
//
// The only place of the library that launches kernels.
#pragma once

#include <cuda_runtime.h>

#include "kernel_loading.h"

namespace tree_attention::cuda {

// `early`: the grid may begin before the one ahead of it in the stream has ended (programmatic
// dependent launch, compute capability 9.0), and waits for that by griddepcontrol_wait, which is
// nothing in code for older devices: that does not begin before. `cluster_size`: neighbouring
// blocks that form a cluster, more than one only if the kernel's code was written for that.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned num_blocks, unsigned num_threads,
                          size_t shared_bytes, cudaStream_t stream, const Params& params,
                          bool early = false, unsigned cluster_size = 1) {
  int ptx_version;
  const cudaError_t error =
      load_kernel(reinterpret_cast<const void*>(kernel), shared_bytes > 48 * 1024, ptx_version);
  if (error != cudaSuccess) return error;
  // Its blocks would each take a cluster's place.
  if (cluster_size > 1 && ptx_version < 90) return cudaErrorNotSupported;
  if ((early || cluster_size > 1) && ptx_version >= 90) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = early;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster_size, 1, 1};
    cudaLaunchConfig_t config{num_blocks, num_threads, shared_bytes,
                              stream,     attributes,  cluster_size > 1 ? 2u : 1u};
    return cudaLaunchKernelEx(&config, kernel, params);
  }
  kernel<<<num_blocks, num_threads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Params>
cudaError_t find_ptx_version(void (*kernel)(Params), int* version) {
  return load_kernel(reinterpret_cast<const void*>(kernel), false, *version);
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
