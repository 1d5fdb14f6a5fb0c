// SPDX-License-Identifier: BSD-3-Clause
//
// What workspaces.cpp takes from torch's headers, where there is one device and no driver.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "cuda_runtime_api.h"

#define C10_CUDA_CHECK(call) \
  ((call) == cudaSuccess ? void() : throw std::runtime_error("error of CUDA: " #call))

namespace c10 {
using DeviceIndex = int8_t;

namespace cuda {

inline DeviceIndex current_device() { return 0; }

struct CUDAGuard {
  explicit CUDAGuard(DeviceIndex) {}
};

struct CUDAStreamCaptureModeGuard {
  explicit CUDAStreamCaptureModeGuard(cudaStreamCaptureMode) {}
};

namespace CUDACachingAllocator {

void emptyCache();  // in test_workspaces.cpp

}  // namespace CUDACachingAllocator

}  // namespace cuda
}  // namespace c10
