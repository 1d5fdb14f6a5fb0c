// SPDX-License-Identifier: BSD-3-Clause
//
// From here to targets/end.h functions are compiled for this instruction set. No include guard.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
