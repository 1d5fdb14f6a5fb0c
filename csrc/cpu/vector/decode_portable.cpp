// SPDX-License-Identifier: BSD-3-Clause
#define TREE_ATTENTION_SIMD "cpu/vector/simd_portable.h"
#include "cpu/vector/kernels.h"

namespace tree_attention::cpu {
constinit const Kernels portable_kernels = VectorKernels::named("portable", Vectors::kPortable);
}
