// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include "cpu/vector/before_target.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define TREE_ATTENTION_SIMD "cpu/vector/simd_avx2.h"
#include "cpu/vector/kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace tree_attention::cpu {
constinit const Kernels avx2_kernels = VectorKernels::named("avx2");
}

#endif
