// SPDX-License-Identifier: BSD-3-Clause
//
// All headers of the standard library and of other folders that the kernels use. A translation unit
// includes this before it tells the compiler of its instruction set, so that what they define is
// compiled for every machine: the reason is in simd.h.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/kernels.h"
