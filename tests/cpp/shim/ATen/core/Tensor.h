// SPDX-License-Identifier: BSD-3-Clause
//
// Stands for torch's header where the kernels run under sanitizers: names for declarations.
#pragma once

namespace at {

class Tensor {};
enum class ScalarType {};

}  // namespace at
