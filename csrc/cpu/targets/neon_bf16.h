// SPDX-License-Identifier: BSD-3-Clause
//
// From here to targets/end.h functions are compiled for this instruction set. No include guard.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+bf16")
#endif
