// SPDX-License-Identifier: BSD-3-Clause
//
// Stands for torch's header where the kernels run under sanitizers: names for declarations.
#pragma once

#include <c10/core/DeviceGuard.h>

namespace at {

class Tensor {
 public:
  c10::Device device() const { return {}; }
};
enum class ScalarType {};

}  // namespace at
