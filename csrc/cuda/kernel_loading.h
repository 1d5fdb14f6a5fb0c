// SPDX-License-Identifier: BSD-3-Clause
//
// CUDA loads a kernel onto a device at its first use (CUDA C++ Programming Guide, "Lazy Loading"),
// which may be a launch that a graph captures. Loading allocates memory and may wait for the
// device, which no thread may do while a stream is captured in the mode "global".
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <map>
#include <mutex>

namespace tree_attention::cuda {

struct KernelUse {
  const void* kernel;
  int device;
  bool large_shared_memory;  // more than every kernel may have without asking

  auto operator<=>(const KernelUse&) const = default;
};

inline cudaError_t load(const KernelUse& use, int& ptx_version) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, use.kernel);  // which loads it
  if (error != cudaSuccess) return error;
  ptx_version = attributes.ptxVersion;
  if (!use.large_shared_memory) return cudaSuccess;
  int most;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, use.device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(use.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               most - static_cast<int>(attributes.sharedSizeBytes));
  if (error != cudaSuccess) return error;
  // As many blocks shall be resident as the plan counts on.
  return cudaFuncSetAttribute(use.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// Loads a kernel onto the current device, unless it is there, without a trace in captures.
// `ptx_version` becomes ten times the compute capability that its code was written for, which may
// be older than the device: the driver compiles PTX for devices that came later.
inline cudaError_t load_kernel(const void* kernel, bool large_shared_memory, int& ptx_version) {
  static std::mutex mutex;
  // Threads may launch until the process ends.
  static auto* const ptx_versions = new std::map<KernelUse, int>;
  KernelUse use{kernel, 0, large_shared_memory};
  cudaError_t error = cudaGetDevice(&use.device);
  if (error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  if (const auto loaded = ptx_versions->find(use); loaded != ptx_versions->end()) {
    ptx_version = loaded->second;
    return cudaSuccess;
  }
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  error = load(use, ptx_version);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  if (restored == cudaSuccess) ptx_versions->emplace(use, ptx_version);
  return restored;
}

}  // namespace tree_attention::cuda
