// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tree_attention::cpu {

// out [n] and *scale: x [n] divided by its largest magnitude, which becomes 127 or 448. A row with
// a NaN or an infinity becomes zeros with the scale NaN. Without a scale (null), float8 is x
// itself, rounded to nearest even and saturating, and a NaN stays one.
void quantise_row(const float* x, int64_t n, Int8* out, float* scale);
void quantise_row(const float* x, int64_t n, Float8* out, float* scale);

}  // namespace tree_attention::cpu
