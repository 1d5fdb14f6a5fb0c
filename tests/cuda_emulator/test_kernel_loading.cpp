// SPDX-License-Identifier: BSD-3-Clause
//
// How kernels are loaded, on a runtime that loads them at their first use and refuses to do so
// during a capture, as CUDA's may.
#include <map>
#include <set>
#include <utility>

#include "check.h"
#include "cuda/kernel_loading.h"

namespace {

constexpr int kMost = 227 << 10, kStatic = 64;

int current_device = 0, num_loads = 0, num_settings = 0;
bool is_capturing = false;
cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
std::set<std::pair<const void*, int>> loaded;
std::map<std::pair<const void*, int>, int> dynamic_bytes;

cudaError_t use(const void* kernel) {
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (!loaded.contains({kernel, current_device})) {
    if (is_capturing && mode != cudaStreamCaptureModeRelaxed) {
      return cudaErrorStreamCaptureUnsupported;
    }
    loaded.insert({kernel, current_device});
    ++num_loads;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = kMost;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  attributes->sharedSizeBytes = kStatic;
  attributes->ptxVersion = current_device == 0 ? 90 : 80;
  return use(kernel);
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  ++num_settings;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    dynamic_bytes[{kernel, current_device}] = value;
  }
  return use(kernel);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(*other, mode);
  return cudaSuccess;
}

void test_kernel_loading() {
  int ptx_version = 0;  // of the last kernel that was loaded
  const auto load_kernel = [&](const void* kernel, bool large_shared_memory) {
    ptx_version = 0;
    return tree_attention::cuda::load_kernel(kernel, large_shared_memory, ptx_version);
  };
  const int first = 0, second = 0;  // any addresses

  // The first launch of the process is one that a graph captures, in the strictest mode.
  is_capturing = true;
  CHECK(use(&first) == cudaErrorStreamCaptureUnsupported, "a capture that refuses nothing");
  CHECK(load_kernel(&first, true) == cudaSuccess && use(&first) == cudaSuccess, "not loaded");
  CHECK(mode == cudaStreamCaptureModeGlobal, "the thread's mode is another one");
  is_capturing = false;

  // Once for each kernel and device.
  CHECK(load_kernel(&first, true) == cudaSuccess && num_loads == 1 && num_settings == 2, num_loads,
        " loads, ", num_settings, " settings");
  CHECK(ptx_version == 90, ptx_version, " for a kernel that is there");
  current_device = 1;
  for (int i = 0; i < 2; ++i) {
    CHECK(load_kernel(&first, true) == cudaSuccess && num_loads == 2, num_loads);
    CHECK(ptx_version == 80, ptx_version, " for what this device runs");
  }
  CHECK((dynamic_bytes[{&first, 1}] == kMost - kStatic), dynamic_bytes[{&first, 1}]);

  // A launch with little shared memory, then one with much.
  CHECK(load_kernel(&second, false) == cudaSuccess && num_settings == 4, num_settings);
  CHECK(load_kernel(&second, true) == cudaSuccess && num_settings == 6, num_settings);

  // What has failed is tried again, and leaves the mode as it was.
  for (int i = 0; i < 2; ++i) {
    CHECK(load_kernel(nullptr, false) == cudaErrorInvalidValue, "no error");
    CHECK(mode == cudaStreamCaptureModeGlobal, "the thread's mode is another one");
  }
}
