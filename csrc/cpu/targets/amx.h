// SPDX-License-Identifier: BSD-3-Clause
//
// From here to targets/end.h functions are compiled for this instruction set. No include guard.
#if defined(__clang__)
#pragma clang attribute push(                                                                                   \
    __attribute__((target(                                                                                      \
        "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,amx-tile,amx-bf16,amx-int8"))), \
    apply_to = function)
#else
// GCC bug 105593: intrinsics that leave lanes undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,amx-tile,amx-bf16,amx-int8")
#endif
