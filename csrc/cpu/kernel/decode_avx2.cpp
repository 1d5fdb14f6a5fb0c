// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "decode_kernel.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "cpu/simd/simd_avx2.h"

namespace tree_attention::cpu::avx2 {
constexpr char kName[] = "avx2";
#include "decode_kernel.inl"
}  // namespace tree_attention::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace tree_attention::cpu {
const Kernels avx2_kernels = avx2::kKernels;
}

#endif
