// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "decode_kernel.h"

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((                                                                         \
        target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16"))), \
    apply_to = function)
#else
// GCC bug 105593: intrinsics that leave lanes undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")
#endif

#include "cpu/simd/simd_avx512.h"

namespace tree_attention::cpu::avx512 {
constexpr char kName[] = "avx512_bf16";
#define TREE_ATTENTION_BF16
#include "decode_kernel.inl"
}  // namespace tree_attention::cpu::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace tree_attention::cpu {
const Kernels avx512_bf16_kernels = avx512::kKernels;
}

#endif
