// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include "cpu/vector/before_target.h"

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
    apply_to = function)
#else
// GCC bug 105593: intrinsics that leave lanes undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif

#define TREE_ATTENTION_SIMD "cpu/vector/simd_avx512.h"
#include "cpu/vector/kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace tree_attention::cpu {
constinit const Kernels avx512_kernels = VectorKernels::named("avx512");
}

#endif
