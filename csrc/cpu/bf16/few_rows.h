// SPDX-License-Identifier: BSD-3-Clause
//
// Few rows with AVX-512's products of pairs of bfloat16, for bfloat16 queries; lanes run over
// head_dim. Keys and values are read in the order of memory, a whole row at a time where registers
// allow: processors without Intel's prefetcher follow nothing else.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/bf16/elements.h"
#include "cpu/bf16/key_dots.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/attention.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/products.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

inline Vec widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// weights [2 terms, kStepKeys] of a row, rounded to bfloat16, and what the first term leaves.
inline void split_weights(const float* weights, BFloat16* terms) {
  const Vec a = load(weights), b = load(weights + kLanes);
  const auto high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
  const Vec rest_a = sub(a, widen(_mm512_castsi512_si256(high)));
  const Vec rest_b = sub(b, widen(_mm512_extracti64x4_epi64(high, 1)));
  _mm512_storeu_si512(terms, high);
  _mm512_storeu_si512(terms + kStepKeys,
                      reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(rest_b, rest_a)));
}

// Pairs of values from the rows of a step.
template <typename T>
class RowPairs {
 public:
  explicit RowPairs(const Step<T>& step) : step_(step) {}

  template <int kPieces>
  __attribute__((always_inline)) void load(int key, int64_t d, int64_t head_dim,
                                           __m512i (&pairs)[kPieces][4]) const {
    alignas(64) static constexpr T zeros[kPieces * kDotElements] = {};
    const T* first = step_.v[key] + d;
    const T* second = key + 1 < step_.count ? step_.v[key + 1] + d : zeros;
    if (const int64_t left = head_dim - d; kPieces == 1 && left < kDotElements) {
      loader_.pair(first, second, pairs[0], static_cast<int>(left));
      return;
    }
#pragma GCC unroll 2
    for (int piece = 0; piece < kPieces; ++piece) {
      loader_.pair(first + piece * kDotElements, second + piece * kDotElements, pairs[piece]);
    }
  }

 private:
  const Step<T>& step_;
  const DotLoader<T> loader_{};
};

// The pairs of values that were loaded before: v [kStepKeys / 2, dot_stride(head_dim)].
struct PackedPairs {
  const uint32_t* v;

  template <int kPieces>
  void load(int key, int64_t d, int64_t head_dim, __m512i (&pairs)[kPieces][4]) const {
    const uint32_t* of_key = v + key / 2 * dot_stride(head_dim) + d;
    for (int i = 0; i < 4 * kPieces; ++i) {
      pairs[i / 4][i % 4] = _mm512_load_si512(of_key + i * kLanes);
    }
  }
};

// acc [kRows, dot_stride(head_dim)] = rescale * acc + terms [kRows, 2, kStepKeys], of which kTerms
// are used, times `count` values, of kPieces * 64 elements at a time, the last of which may be
// shorter. Sums are in the order of pairs. kHalf: elements exceed the true ones by 1/2.
template <int kRows, int kPieces, int kTerms, bool kHalf, typename Pairs, typename Ahead>
__attribute__((noinline)) void sum_pairs(const Pairs& values, int count, const BFloat16* terms,
                                         const float* rescale, int64_t head_dim, float* acc,
                                         const Ahead* ahead) {
  static_assert(kRows * kPieces <= 4);  // 16 sums
  Vec none[kRows];
  for (int row = 0; row < kRows; ++row) {
    none[row] = zero();
    for (int term = 0; kHalf && term < kTerms; ++term) {
      none[row] = minus_half(_mm512_loadu_si512(terms + (2 * row + term) * kStepKeys), none[row]);
    }
    if constexpr (kHalf) none[row] = broadcast(reduce_add(none[row]));
  }
  for (int64_t d = 0; d < head_dim; d += kPieces * kDotElements) {
    Vec sums[kRows][4 * kPieces];
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < 4 * kPieces; ++i) sums[row][i] = none[row];
    }
    for (int key = 0; key < count; key += 2) {
      if (ahead != nullptr && d == 0) {
        ahead->fetch_value(key);
        ahead->fetch_value(key + 1);
      }
      __m512i pairs[kPieces][4];
      values.template load<kPieces>(key, d, head_dim, pairs);
#pragma GCC unroll 8
      for (int i = 0; i < 4 * kPieces; ++i) {
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
          for (int term = 0; term < kTerms; ++term) {
            const __m512i weight = broadcast_pair(terms + (2 * row + term) * kStepKeys + key);
            sums[row][i] = dot(weight, pairs[i / 4][i % 4], sums[row][i]);
          }
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec factor = broadcast(rescale[row]);
      float* out = acc + row * dot_stride(head_dim) + d;
      for (int i = 0; i < 4 * kPieces; ++i) {
        store(out + i * kLanes, fma(load(out + i * kLanes), factor, sums[row][i]));
      }
    }
  }
}

// With products of pairs, for bfloat16 queries.
template <typename T>
class PairAttention : RowsAttention<T> {
 public:
  PairAttention(const DecodeParams& p, const Rows& rows, void* workspace)
      : RowsAttention<T>(p, rows, workspace, dot_stride(p.head_dim_v)),
        packed_v_(reinterpret_cast<uint32_t*>(state_.end)),
        packed_k_(
            reinterpret_cast<BFloat16*>(packed_v_ + kStepKeys / 2 * dot_stride(p.head_dim_v))) {}

  static size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
    return row_state_bytes(p, num_rows, dot_stride(p.head_dim_v)) +
           kStepKeys * 2 * (dot_stride(p.head_dim_v) + dot_stride(p.head_dim));
  }

  // The partial state of the rows over their keys in `range`: see Kernels::attend. False if a NaN
  // may come from an infinite value, with a weight whose second term is 0 or less its half.
  bool run(KeyRange range, float* o, float* lse) {
    load_queries();
    this->walk_in_order(range, [this](auto&&... arguments) { attend_step(arguments...); });
    for (int64_t i = 0; i < rows_.count * state_.stride; i += kDotElements) {
      restore_order(static_cast<const T*>(nullptr), state_.total + i);
    }
    state_.template normalise<float>(o, lse);
    if (!kHalf && !weights_need_two_terms(p_)) return true;
    for (int64_t row = 0; row < rows_.count; ++row) {
      const bool values_alone = lse[row] == lse[row];  // and no score is a NaN
      if (values_alone && has_nan(o + row * p_.head_dim_v, p_.head_dim_v)) return false;
    }
    return true;
  }

 private:
  using RowsAttention<T>::p_, RowsAttention<T>::rows_, RowsAttention<T>::state_;
  static constexpr bool kHalf = kExceedsByHalf<T>;

  void load_queries() {
    auto* q = reinterpret_cast<BFloat16*>(state_.q);
    for (int64_t row = 0; row < rows_.count; ++row, q += dot_stride(p_.head_dim)) {
      __builtin_memset(q, 0, dot_stride(p_.head_dim) * sizeof(BFloat16));
      __builtin_memcpy(q, query_of_row<BFloat16>(p_, rows_, row), p_.head_dim * sizeof(BFloat16));
      for (int64_t d = 0; d < p_.head_dim; d += kDotElements) {
        arrange(static_cast<const T*>(nullptr), q + d);
      }
    }
  }

  // Adds the keys of `step`, which begins at `key`, to rows [row_begin, row_end), all of which see
  // all of them. For more than a block of rows keys are converted and values paired only once.
  void attend_step(int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step,
                   const LinesAhead<T>* ahead) {
    const bool packed = kIsScaled<T> && row_end - row_begin > kRowBlock;
    const BFloat16* converted[kStepKeys + kKeyBlock];
    if constexpr (kIsScaled<T>) {
      if (packed) convert_keys(step, converted);
    }
    const auto ahead_of = [&](int64_t row) { return row == row_begin ? ahead : nullptr; };
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      const BFloat16* q =
          reinterpret_cast<const BFloat16*>(state_.q) + row * dot_stride(p_.head_dim);
      float* scores = state_.scores + row * kStepKeys;
      if constexpr (kIsScaled<T>) {
        if (packed) {
          score_dots<kRows, kHalf>(converted, step.count, q, dot_stride(p_.head_dim), scores,
                                   kStepKeys, ahead_of(row));
          return;
        }
      }
      score_dots<kRows, kHalf>(step.k, step.count, q, p_.head_dim, scores, kStepKeys,
                               ahead_of(row));
    });
    float rescale[kMaxRows];
    this->weigh_rows(row_begin, row_end, key, step, score_scale(p_), rescale);
    if constexpr (kIsScaled<T>) {
      if (packed) pack_values(step);
    }
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      alignas(64) BFloat16 terms[2 * kRows * kStepKeys];
      for (int i = 0; i < kRows; ++i) {
        split_weights(state_.scores + (row + i) * kStepKeys, terms + 2 * i * kStepKeys);
      }
      float* acc = state_.acc + row * state_.stride;
      if (weights_need_two_terms(p_)) {
        sum_values<kRows, 2>(step, packed, terms, rescale + row, acc, ahead_of(row));
      } else {
        sum_values<kRows, 1>(step, packed, terms, rescale + row, acc, ahead_of(row));
      }
    });
  }

  template <int kRows, int kTerms>
  void sum_values(const Step<T>& step, bool packed, const BFloat16* terms, const float* rescale,
                  float* acc, const LinesAhead<T>* ahead) {
    const auto sum = [&]<int kSummed, int kPieces>(int first, const auto& values,
                                                   const LinesAhead<T>* lines) {
      sum_pairs<kSummed, kPieces, kTerms, kHalf>(values, step.count, terms + 2 * first * kStepKeys,
                                                 rescale + first, p_.head_dim_v,
                                                 acc + first * state_.stride, lines);
    };
    if constexpr (kIsScaled<T>) {  // converting twice costs more than the order of memory gains
      if (packed) {
        sum.template operator()<kRows, 1>(0, PackedPairs{packed_v_}, ahead);
      } else {
        sum.template operator()<kRows, 1>(0, RowPairs<T>(step), ahead);
      }
    } else if (p_.head_dim_v % (2 * kDotElements) != 0) {
      sum.template operator()<kRows, 1>(0, RowPairs<T>(step), ahead);
    } else {
      constexpr int kFirst = kRows < 2 ? kRows : 2;
      sum.template operator()<kFirst, 2>(0, RowPairs<T>(step), ahead);
      if constexpr (kRows > 2) {
        sum.template operator()<kRows - 2, 2>(2, RowPairs<T>(step), nullptr);
      }
    }
  }

  // The keys of `step` as bfloat16, in the order in which they are loaded.
  void convert_keys(const Step<T>& step, const BFloat16** converted) const {
    const DotLoader<T> loader;
    const int64_t stride = dot_stride(p_.head_dim);
    for (int key = 0; key < step.count; ++key) {
      BFloat16* out = packed_k_ + key * stride;
      converted[key] = out;
      for_pieces(p_.head_dim, loader, [&](int64_t d, const auto& load_key) {
        __m512i x[2];
        load_key(step.k[key] + d, x);
        _mm512_store_si512(out + d, x[0]);
        _mm512_store_si512(out + d + kHalfElements, x[1]);
      });
    }
    for (int key = step.count; key < kStepKeys + kKeyBlock; ++key) {
      converted[key] = converted[step.count - 1];
    }
  }

  void pack_values(const Step<T>& step) const {
    const RowPairs<T> values(step);
    const int64_t stride = dot_stride(p_.head_dim_v);
    for (int key = 0; key < step.count; key += 2) {
      for (int64_t d = 0; d < p_.head_dim_v; d += kDotElements) {
        __m512i pairs[1][4];
        values.template load<1>(key, d, p_.head_dim_v, pairs);
        for (int i = 0; i < 4; ++i) {
          _mm512_store_si512(packed_v_ + key / 2 * stride + d + i * kLanes, pairs[0][i]);
        }
      }
    }
  }

  uint32_t* const packed_v_;  // [kStepKeys / 2, dot_stride(head_dim_v)]
  BFloat16* const packed_k_;  // [kStepKeys, dot_stride(head_dim)], of keys of 8 bits
};

}  // namespace
}  // namespace tree_attention::cpu
