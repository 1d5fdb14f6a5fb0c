// SPDX-License-Identifier: BSD-3-Clause
//
// Where kernels with known answers run: on a GPU, or on the emulated device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "check.h"
#include "cuda/device.h"

namespace tree_attention::testing {

// Memory that host and device both reach, and a wait for the device.
struct Device {
  void* (*allocate)(size_t bytes);
  void (*synchronize)();

  template <typename T>
  T* array(const std::vector<T>& values) const {
    T* copy = static_cast<T*>(allocate(values.size() * sizeof(T)));
    std::copy(values.begin(), values.end(), copy);
    return copy;
  }

  template <typename Params>
  void run(void (*kernel)(Params), unsigned blocks, unsigned threads, size_t shared_bytes,
           const Params& params) const {
    CHECK(
        cuda::launch_kernel(kernel, blocks, threads, shared_bytes, nullptr, params) == cudaSuccess,
        "launch");
    synchronize();
  }
};

}  // namespace tree_attention::testing
