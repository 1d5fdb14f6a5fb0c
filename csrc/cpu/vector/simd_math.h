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

// Eigen's rational approximation, a few ulps; saturates where float32 tanh does.
inline Vec tanh(Vec x) {
  const Vec bound = broadcast(7.90531110763549805f);
  const Vec clamped = max_keep_nan(sub(zero(), bound), min_keep_nan(bound, x));
  const Vec square = mul(clamped, clamped);
  Vec p = broadcast(-2.76076847742355e-16f);
  p = fma(p, square, broadcast(2.00018790482477e-13f));
  p = fma(p, square, broadcast(-8.60467152213735e-11f));
  p = fma(p, square, broadcast(5.12229709037114e-08f));
  p = fma(p, square, broadcast(1.48572235717979e-05f));
  p = fma(p, square, broadcast(6.37261928875436e-04f));
  p = mul(fma(p, square, broadcast(4.89352455891786e-03f)), clamped);
  Vec q = broadcast(1.19825839466702e-06f);
  q = fma(q, square, broadcast(1.18534705686654e-04f));
  q = fma(q, square, broadcast(2.26843463243900e-03f));
  q = fma(q, square, broadcast(4.89352518554385e-03f));
  return select_below(abs(x), 4e-4f, x, div(p, q));
}

}  // namespace
}  // namespace tree_attention::cpu
