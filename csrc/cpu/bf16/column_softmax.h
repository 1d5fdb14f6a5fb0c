// SPDX-License-Identifier: BSD-3-Clause
//
// The softmax of many rows, whose lanes are rows from the first product to the last, so that
// nothing is shuffled between them:
//   S^T [keys, rows] = K Q^T,   P^T = 2^(S^T - base),   O^T [dims, rows] += V^T P^T.
// Keys are taken kPackedKeys at a time, and the rows of the output attend to them in blocks. AMX
// and products of pairs differ in the two products and in their memory `m`, which has RowArrays:
// `base` is an integer, and `begin` and `end` are counted from the first key of the call.
#pragma once

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/decode_params.h"
#include "common/rows.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/key_blocks.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"

namespace tree_attention::cpu {
namespace {

constexpr int kPackedKeys = 256;  // keys that are packed at a time
constexpr int kPackedSteps = kPackedKeys / kStepKeys;

// Scores beyond it are left to the vectors: rounding errors would exceed every exponent.
constexpr float kLargestScore = 1 << 21;

// 2^(x - base), for integer bases and offset = kRoundToInteger - base: what is added to a small
// number to round it to an integer, which then is in the low bits. 0 below 2^-125. Relative error
// below 2e-7 (a minimax polynomial).
constexpr float kRoundToInteger = 3 << 22;
inline Vec exp2_above(Vec score, Vec scale, Vec offset) {
  const Vec shifted = fma(score, scale, offset);
  const Vec f = _mm512_fmsub_ps(score, scale, sub(shifted, offset));
  Vec p = broadcast(0.0013264728477224708f);
  p = fma(p, f, broadcast(0.009671513922512531f));
  p = fma(p, f, broadcast(0.05550733581185341f));
  p = fma(p, f, broadcast(0.24022242426872253f));
  p = fma(p, f, broadcast(0.6931470036506653f));
  p = fma(p, f, broadcast(1.0f));
  const __mmask16 normal =
      _mm512_cmp_ps_mask(shifted, broadcast(kRoundToInteger - 125), _CMP_NLT_UQ);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(
      normal, _mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// The weights of two keys as pairs in the order of keys: their first term to `out`, and, where
// there are two, what it leaves to `out + stride`.
template <int kTerms>
inline void store_weight_pairs(Vec a, Vec b, float* out, int64_t stride) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto pair = [&](__m512i low, __m512i high) {
    return _mm512_ternarylogic_epi32(mask, high, _mm512_srli_epi32(low, 16), 0xca);
  };
  const __m512i high_a = _mm512_add_epi32(_mm512_castps_si512(a), half);
  const __m512i high_b = _mm512_add_epi32(_mm512_castps_si512(b), half);
  _mm512_store_si512(out, pair(high_a, high_b));
  if constexpr (kTerms == 2) {
    const auto rest = [&](Vec x, __m512i rounded) {
      return _mm512_castps_si512(sub(x, _mm512_castsi512_ps(_mm512_and_si512(rounded, mask))));
    };
    const __m512i low_a = _mm512_add_epi32(rest(a, high_a), half);
    const __m512i low_b = _mm512_add_epi32(rest(b, high_b), half);
    _mm512_store_si512(out + stride, pair(low_a, low_b));
  }
}

// Below, `scores` belong to the vector of rows from `row` on, the packed keys `stride` apart;
// `acc` and `total` are its sums of values, head_dim_v vectors `stride` apart.

// Scores of keys that a row does not see become -inf.
template <typename Memory>
inline void mask_scores(const Memory& m, const KeyBlock& key_block, int64_t row, float* scores,
                        int64_t stride) {
  const __m512i begin = _mm512_loadu_si512(m.begin + row), end = _mm512_loadu_si512(m.end + row);
  const Vec nothing = broadcast(-INFINITY);
  for (int i = key_block.first_step * kStepKeys; i < key_block.last_step * kStepKeys; ++i) {
    const __m512i key = _mm512_set1_epi32(static_cast<int>(key_block.key + i));
    const __mmask16 seen = _mm512_cmple_epi32_mask(begin, key) & _mm512_cmplt_epi32_mask(key, end);
    float* score = scores + i * stride;
    store(score, _mm512_mask_mov_ps(nothing, seen, load(score)));
  }
}

inline void add_to_sums(double* sum, Vec x) {
  _mm512_storeu_pd(sum,
                   _mm512_add_pd(_mm512_loadu_pd(sum), _mm512_cvtps_pd(_mm512_castps512_ps256(x))));
  _mm512_storeu_pd(sum + 8, _mm512_add_pd(_mm512_loadu_pd(sum + 8),
                                          _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))));
}

// Raises the bases of rows whose largest scores exceed them by too much. False if a score is too
// large for that.
template <typename Memory>
inline bool raise_base(const DecodeParams& p, const Memory& m, const KeyBlock& key_block,
                       int64_t row, const float* scores, Vec scale, float* acc, int64_t stride) {
  const int first = key_block.first_step * kStepKeys, last = key_block.last_step * kStepKeys;
  Vec largest[4];
  for (int i = 0; i < 4; ++i) largest[i] = load(scores + (first + i) * stride);
  for (int key = first + 4; key < last; key += 4) {
    for (int i = 0; i < 4; ++i) {
      largest[i] = max_keep_nan(largest[i], load(scores + (key + i) * stride));
    }
  }
  const Vec top =
      mul(max_keep_nan(max_keep_nan(largest[0], largest[1]), max_keep_nan(largest[2], largest[3])),
          scale);
  const Vec base = load(m.base + row);
  const __mmask16 above = _mm512_cmp_ps_mask(top, add(base, broadcast(kBaseSlack)), _CMP_NLE_UQ);
  if (above == 0) return true;
  const Vec new_base =
      _mm512_mask_roundscale_ps(base, above, top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  store(m.base + row, new_base);
  const Vec factor = _mm512_scalef_ps(broadcast(1.0f), sub(base, new_base));
  for (int64_t d = 0; d < p.head_dim_v; ++d) {
    store(acc + d * stride, mul(load(acc + d * stride), factor));
  }
  double* sum = m.sum + row;
  _mm512_storeu_pd(
      sum, _mm512_mul_pd(_mm512_loadu_pd(sum), _mm512_cvtps_pd(_mm512_castps512_ps256(factor))));
  _mm512_storeu_pd(sum + 8, _mm512_mul_pd(_mm512_loadu_pd(sum + 8),
                                          _mm512_cvtps_pd(_mm512_extractf32x8_ps(factor, 1))));
  return _mm512_mask_cmp_ps_mask(above, abs(top), broadcast(kLargestScore), _CMP_NLT_UQ) == 0;
}

// Adds sums since the last flush to the totals.
template <typename Memory>
inline void flush_sums(const DecodeParams& p, const Memory& m, int64_t row, float* acc,
                       float* total, int64_t stride) {
  const Vec base = load(m.base + row);
  const Vec factor = _mm512_scalef_ps(broadcast(1.0f), sub(load(m.total_base + row), base));
  for (int64_t i = 0; i < p.head_dim_v * stride; i += stride) {
    store(total + i, fma(load(total + i), factor, load(acc + i)));
    store(acc + i, zero());
  }
  store(m.total_base + row, base);
}

// o [count, head_dim_v], where place_of_dim(d) is the vector of `total` that holds dim d, and lse
// [count]; false if o is not finite.
template <typename Memory, typename PlaceOfDim>
inline bool normalise_sums(const DecodeParams& p, const Memory& m, int64_t row, int64_t count,
                           const float* total, int64_t stride, const PlaceOfDim& place_of_dim,
                           float* o, float* lse) {
  __mmask16 not_finite = 0;
  float factor[kLanes];
  for (int64_t i = 0; i < count; ++i) {
    const float sum = static_cast<float>(m.sum[row + i]);
    factor[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
    lse[i] = lse_of(m.base[row + i], m.sum[row + i]);
  }
  for (int64_t d = 0; d < p.head_dim_v; d += kLanes) {
    __m512i x[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      x[i] = _mm512_load_si512(total + place_of_dim(d + i) * stride);
    }
    transpose(x);
    for (int64_t i = 0; i < count; ++i) {
      const Vec out = mul(_mm512_castsi512_ps(x[i]), broadcast(factor[i]));
      constexpr int kNotFinite = 0x99;  // quiet NaN, +-infinity, signalling NaN
      not_finite |= _mm512_fpclass_ps_mask(out, kNotFinite);
      store(o + i * p.head_dim_v + d, out);
    }
  }
  return not_finite == 0;
}

}  // namespace
}  // namespace tree_attention::cpu
