// SPDX-License-Identifier: BSD-3-Clause
//
// Functions of vectors.
#pragma once

#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

// 2^x for x <= 0 or NaN; 0 below -126.5 at the latest. Relative error below 2e-7 (Cephes exp2f).
inline Vec exp2_nonpositive(Vec x) {
  x = max_keep_nan(broadcast(-127.0f), x);
  const Vec n = round(x), f = sub(x, n);
  Vec p = broadcast(1.535336188319500e-4f);
  p = fma(p, f, broadcast(1.339887440266574e-3f));
  p = fma(p, f, broadcast(9.618437357674640e-3f));
  p = fma(p, f, broadcast(5.550332471162809e-2f));
  p = fma(p, f, broadcast(2.402264791363012e-1f));
  p = fma(p, f, broadcast(6.931472028550421e-1f));
  return scale_by_exponent(fma(p, f, broadcast(1.0f)), n);
}

// Below 2 ulps: near 0 the polynomial of Cephes' tanhf, elsewhere (1 - e) / (1 + e) with
// e = exp(-2 |x|), which is as exact near 1 as float32 is.
inline Vec tanh(Vec x) {
  const Vec square = mul(x, x);
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const Vec near_zero = fma(mul(p, square), x, x);
  const Vec e = exp2_nonpositive(mul(abs(x), broadcast(-2.88539008177792681f)));
  const Vec large = div(sub(broadcast(1.0f), e), add(broadcast(1.0f), e));
  const Vec signed_large = select_below(x, 0.0f, sub(zero(), large), large);
  return select_below(abs(x), 0.625f, near_zero, signed_large);
}

}  // namespace
}  // namespace tree_attention::cpu
