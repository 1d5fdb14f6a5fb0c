// SPDX-License-Identifier: BSD-3-Clause
#include <cmath>
#include <cstdint>

#include "cpu/simd/simd_portable.h"
#include "decode_kernel.h"

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
