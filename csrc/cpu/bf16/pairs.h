// SPDX-License-Identifier: BSD-3-Clause
//
// Pairs of bfloat16, and scores whose lanes are rows: for AMX tiles and for AVX-512's products of
// pairs.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/bf16/eight_bits.h"
#include "cpu/bf16/terms.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/simd_math.h"
#include "cpu/vector/softmax.h"

namespace tree_attention::cpu {
namespace {

// sum + the products of pairs (a, b) of bfloat16.
inline Vec dot(__m512i a, __m512i b, Vec sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline __m512i broadcast_pair(const void* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

// Elements i and 16 + i become pair i.
inline __m512i interleave_halves(__m512i x) {
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(interleave, x);
}

// Keys [key, key_end) of 8 bits, an even number of them, as bfloat16, in dims [d, d_end).
template <typename T>
inline void convert_keys(const Step<T>& step, int key, int key_end, int64_t d, int64_t d_end,
                         int64_t head_dim, BFloat16* out) {
  for (; key < key_end; key += 2) {
    BFloat16* row = out + key * head_dim;
    for (int64_t i = d; i < d_end; i += kTilePair) {
      __m512i first, second;
      pair_halves(step.k[key] + i, step.k[key + 1] + i, first, second);
      _mm512_storeu_si512(row + i, first);
      _mm512_storeu_si512(row + head_dim + i, second);
    }
  }
}

// Transposes a 16 x 16 matrix of 32-bit elements in place.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; ++j) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
      y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
    }
  }
  for (int j = 0; j < 8; ++j) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
    x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
  }
}

// adjust_scores for scores [kStepKeys, kColumns] whose lanes are rows.
template <int kColumns>
inline void adjust_columns(const DecodeParams& p, const Rows& rows, int64_t first, int64_t last,
                           int64_t key, int num_keys, float* scores) {
  constexpr int kSize = kStepKeys * kColumns, kVectorKeys = kLanes / kColumns;
  const Vec scale = broadcast(score_scale(p)), factor = broadcast(p.softcap * kLog2E);
  for (int i = 0; i < kSize; i += kLanes) {
    Vec score = mul(load(scores + i), scale);
    if (p.softcap != 0.0f) score = mul(tanh(score), factor);
    store(scores + i, score);
  }
  if (p.alibi_slopes == nullptr) return;
  float slopes[kLanes] = {};
  int64_t positions[kLanes] = {}, key_of_lane[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    key_of_lane[lane] = lane / kColumns;
    if (first + lane % kColumns >= last) continue;
    const auto [token, head] = place_of_row(p, rows, first + lane % kColumns);
    slopes[lane] = -kLog2E * p.alibi_slopes[head];
    positions[lane] = query_position(p, rows.batch, token);
  }
  int64_t key_positions[kStepKeys + kLanes] = {};
  locate_positions(p.key_layout, key, key_positions);
  // Repeated keys keep repeating the last one, or they could set the maximum.
  for (int i = num_keys; i < kStepKeys; ++i) key_positions[i] = key_positions[num_keys - 1];
  const auto distances = [&](int i, int begin) {
    const __m512i of_keys =
        _mm512_permutexvar_epi64(_mm512_loadu_si512(key_of_lane + begin),
                                 _mm512_loadu_si512(key_positions + i * kVectorKeys));
    return _mm512_cvtepi64_ps(_mm512_sub_epi64(_mm512_loadu_si512(positions + begin), of_keys));
  };
  for (int i = 0; i < kSize / kLanes; ++i) {
    const Vec distance =
        _mm512_insertf32x8(_mm512_castps256_ps512(distances(i, 0)), distances(i, 8), 1);
    store(scores + i * kLanes, fma(load(slopes), distance, load(scores + i * kLanes)));
  }
}

inline bool has_nan(const float* x, int64_t size) {
  __mmask16 nan = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const auto left = static_cast<int>(size - i < kLanes ? size - i : kLanes);
    const Vec values = _mm512_maskz_loadu_ps(first_lanes(left), x + i);
    nan |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  }
  return nan != 0;
}

}  // namespace
}  // namespace tree_attention::cpu
