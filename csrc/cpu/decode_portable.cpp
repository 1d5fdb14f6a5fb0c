// SPDX-License-Identifier: BSD-3-Clause
#include <cmath>
#include <cstdint>

#include "decode_kernel.h"
#include "simd_portable.h"

namespace tree_attention::cpu::portable {
constexpr char kName[] =
#if defined(__ARM_NEON)
    "neon";
#else
    "portable";
#endif
#include "decode_kernel.inl"
}  // namespace tree_attention::cpu::portable

namespace tree_attention::cpu {
const Kernels portable_kernels = portable::kKernels;
}
