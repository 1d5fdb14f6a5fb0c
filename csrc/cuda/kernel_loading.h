// SPDX-License-Identifier: BSD-3-Clause
//
// CUDA loads a kernel onto a device at its first use (CUDA C++ Programming Guide, "Lazy Loading"),
// which may be a launch that a graph captures. Loading allocates memory and may wait for the
// device, which no thread may do while a stream is captured in the mode "global".
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <mutex>
#include <set>

namespace tree_attention::cuda {

struct KernelUse {
  const void* kernel;
  int device;
  bool large_shared_memory;  // more than every kernel may have without asking

  auto operator<=>(const KernelUse&) const = default;
};

inline cudaError_t load(const KernelUse& use) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, use.kernel);  // which loads it
  if (error != cudaSuccess || !use.large_shared_memory) return error;
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
inline cudaError_t load_kernel(const void* kernel, bool large_shared_memory) {
  static std::mutex mutex;
  static auto* const loaded = new std::set<KernelUse>;  // threads may launch until the process ends
  KernelUse use{kernel, 0, large_shared_memory};
  cudaError_t error = cudaGetDevice(&use.device);
  if (error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  if (loaded->contains(use)) return cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  error = load(use);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  if (restored == cudaSuccess) loaded->insert(use);
  return restored;
}

}  // namespace tree_attention::cuda
