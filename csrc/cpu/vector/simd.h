// SPDX-License-Identifier: BSD-3-Clause
//
// The vectors of the instruction set that a translation unit is compiled for: a unit defines
// TREE_ATTENTION_SIMD before its first kernel header. Everything in these headers is in an unnamed
// namespace, because every unit compiles them for other instructions.
//
// A unit includes the headers of the standard library and of common/ before it tells the compiler
// of the instruction set, and nothing here instantiates a template of the standard library: the
// linker keeps one copy of such a function, whichever unit it comes from, and that copy must run on
// every machine. `nm -C decode_avx512.o | grep ' W '` must print nothing.
#pragma once

#ifndef TREE_ATTENTION_SIMD
#define TREE_ATTENTION_SIMD "cpu/vector/simd_portable.h"
#endif

#include TREE_ATTENTION_SIMD
