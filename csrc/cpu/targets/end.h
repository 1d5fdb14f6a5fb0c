// SPDX-License-Identifier: BSD-3-Clause
//
// The end of what a header of this folder begins. No include guard.
#if defined(__clang__)
#pragma clang attribute pop
#endif
