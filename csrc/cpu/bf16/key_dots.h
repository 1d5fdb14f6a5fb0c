// SPDX-License-Identifier: BSD-3-Clause
//
// Products of a few queries and keys in pairs of bfloat16, with lanes over head_dim: for attention
// and for the scores of an index.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/dtype.h"
#include "cpu/bf16/elements.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

// The sums of the lanes of four vectors.
inline __m128 sum_lanes(const Vec (&x)[4]) {
  const Vec ab = add_halves(x[0], x[1]), cd = add_halves(x[2], x[3]);
  const Vec quarters = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// x times -1/2, in sums of its lanes.
inline Vec minus_half(__m512i x, Vec sum) {
  return dot(x, _mm512_set1_epi32(static_cast<int>(0xbf00bf00u)), sum);
}

// scores [kRows, stride] = q times `count` keys, at most kStepKeys, of kPieces * 64 elements. The
// queries stay in registers. kHalf: elements exceed the true ones by 1/2.
template <int kRows, int kPieces, bool kHalf, typename T, typename Ahead>
__attribute__((noinline)) void score_whole_keys(const T* const* k, int count, const BFloat16* q,
                                                float* scores, int stride, Ahead* ahead) {
  const DotLoader<T> loader;
  __m512i of_row[kRows][2 * kPieces];
  Vec none[4] = {zero(), zero(), zero(), zero()};
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < 2 * kPieces; ++i) {
      of_row[row][i] = _mm512_loadu_si512(q + row * kPieces * kDotElements + i * kHalfElements);
      if constexpr (kHalf) none[row] = minus_half(of_row[row][i], none[row]);
    }
  }
  alignas(16) float by_key[kStepKeys][4];
  for (int key = 0; key < count; ++key) {
    if (ahead != nullptr) ahead->fetch_key(key);
    Vec sums[4] = {none[0], none[1], none[2], none[3]};
    for (int piece = 0; piece < kPieces; ++piece) {
      __m512i x[2];
      loader(k[key] + piece * kDotElements, x);
      for (int half = 0; half < 2; ++half) {
        for (int row = 0; row < kRows; ++row) {
          sums[row] = dot(of_row[row][2 * piece + half], x[half], sums[row]);
        }
      }
    }
    _mm_store_ps(by_key[key], sum_lanes(sums));
  }
  for (int key = 0; key < count; key += 4) {
    __m128 x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm_load_ps(by_key[key + i]);
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
    for (int row = 0; row < kRows; ++row) _mm_storeu_ps(scores + row * stride + key, x[row]);
  }
}

// The same for rows of any length, four keys at a time.
template <int kRows, bool kHalf, typename T, typename Ahead>
inline void score_key_blocks(const T* const* k, int count, const BFloat16* q, int64_t head_dim,
                             float* scores, int stride, Ahead* ahead) {
  const DotLoader<T> loader;
  const int64_t q_stride = dot_stride(head_dim);
  Vec none[kRows];
  for (int row = 0; row < kRows; ++row) {
    none[row] = zero();
    for (int64_t d = 0; kHalf && d < q_stride; d += kHalfElements) {
      none[row] = minus_half(_mm512_loadu_si512(q + row * q_stride + d), none[row]);
    }
  }
  for (int first = 0; first < count; first += kKeyBlock) {
    Vec sums[kRows][kKeyBlock];
    for (int row = 0; row < kRows; ++row) {
      for (int key = 0; key < kKeyBlock; ++key) sums[row][key] = none[row];
    }
    for_pieces(head_dim, loader, [&](int64_t d, const auto& load_keys) {
      __m512i x[kKeyBlock][2];
      for (int key = 0; key < kKeyBlock; ++key) {
        if (ahead != nullptr && d == 0) ahead->fetch_key(first + key);
        load_keys(k[first + key] + d, x[key]);
      }
      for (int half = 0; half < 2; ++half) {
        for (int row = 0; row < kRows; ++row) {
          const __m512i of_row = _mm512_loadu_si512(q + row * q_stride + d + half * kHalfElements);
          for (int key = 0; key < kKeyBlock; ++key) {
            sums[row][key] = dot(of_row, x[key][half], sums[row][key]);
          }
        }
      }
    });
    store_sums<kRows>(sums, scores + first, stride);
  }
}

// scores [kRows, stride] = q [kRows, dot_stride(head_dim)] times `count` keys, at most kStepKeys.
// Keys are read in blocks of kKeyBlock, of which the last one may end past `count`.
// ahead->fetch_key(i) is called for each key, unless it is null.
template <int kRows, bool kHalf, typename T, typename Ahead>
inline void score_dots(const T* const* k, int count, const BFloat16* q, int64_t head_dim,
                       float* scores, int stride, Ahead* ahead) {
  if (head_dim == kDotElements) {
    score_whole_keys<kRows, 1, kHalf>(k, count, q, scores, stride, ahead);
  } else if (head_dim == 2 * kDotElements) {
    score_whole_keys<kRows, 2, kHalf>(k, count, q, scores, stride, ahead);
  } else {
    score_key_blocks<kRows, kHalf>(k, count, q, head_dim, scores, stride, ahead);
  }
}

}  // namespace
}  // namespace tree_attention::cpu
