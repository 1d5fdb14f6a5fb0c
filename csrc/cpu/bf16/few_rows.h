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
#include "cpu/bf16/eight_bits.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/attention.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/products.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

// Elements of a row that are taken at a time, as two vectors of bfloat16 in the order of memory.
constexpr int kDotElements = 64;
constexpr int kHalfElements = kDotElements / 2;

// Queries are kept as they are, in rows of this length, padded with zeros.
inline int64_t dot_stride(int64_t head_dim) {
  return (head_dim + kDotElements - 1) / kDotElements * kDotElements;
}

// Loads kDotElements elements, or the first n, as bfloat16.
template <typename T>
class DotLoader;

template <>
class DotLoader<BFloat16> {
 public:
  void operator()(const BFloat16* p, __m512i (&x)[2]) const {
    x[0] = _mm512_loadu_si512(p);
    x[1] = _mm512_loadu_si512(p + kHalfElements);
  }
  void operator()(const BFloat16* p, int n, __m512i (&x)[2]) const {
    x[0] = load_16_bit(p, n);
    x[1] = n <= kHalfElements ? __m512i{} : load_16_bit(p + kHalfElements, n - kHalfElements);
  }
};

// The bytes of the bfloat16 of i + 1/2. Every element of int8 is one of these, or its negative,
// less 1/2: with a sign of its own it takes two tables instead of four.
struct Int8Table {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr Int8Table() {
    for (int i = 0; i < 128; ++i) {
      const auto bits = __builtin_bit_cast(uint32_t, static_cast<float>(i) + 0.5f);
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
constexpr Int8Table kInt8Table;

// Whether loaded elements exceed the true ones by 1/2, which their sums have to be rid of.
template <typename T>
constexpr bool kExceedsByHalf = __is_same(T, Int8);

template <typename T>
  requires(sizeof(T) == 1)
class DotLoader<T> {
 public:
  DotLoader() {
    const auto& table = []() -> const auto& {
      if constexpr (__is_same(T, Int8)) {
        return kInt8Table;
      } else {
        return kFloat8Table;
      }
    }();
    for (int i = 0; i < 2; ++i) {
      low_[i] = _mm512_load_si512(table.low + 64 * i);
      high_[i] = _mm512_load_si512(table.high + 64 * i);
    }
    // Or gcc inverts by vpternlog, which waits for what its target held before.
    asm("" : "+v"(ones_));
  }

  void operator()(const T* p, __m512i (&x)[2]) const { convert(_mm512_loadu_si512(p), x); }
  void operator()(const T* p, int n, __m512i (&x)[2]) const {
    const __mmask64 first = n >= kDotElements ? ~__mmask64{0} : (__mmask64{1} << n) - 1;
    convert(_mm512_maskz_loadu_epi8(first, p), x);
  }

 private:
  void convert(__m512i bytes, __m512i (&x)[2]) const {
    // unpack takes the low halves of the 128-bit lanes first.
    bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
    __m512i place = bytes;               // its last seven bits are looked up
    if constexpr (__is_same(T, Int8)) {  // n or, below 0, -n - 1
      place = _mm512_min_epu8(bytes, _mm512_xor_si512(bytes, ones_));
    }
    const __m512i low = _mm512_permutex2var_epi8(low_[0], place, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], place, high_[1]);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    // magnitude | (bytes & sign)
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, bytes, sign, 0xf8);
    x[0] = _mm512_unpacklo_epi8(low, high);
    x[1] = _mm512_unpackhi_epi8(low, high);
  }

  __m512i low_[2], high_[2], ones_ = _mm512_set1_epi8(-1);
};

// Calls body(d, load) for pieces of kDotElements of a row; the last one loads what is left of it.
template <typename T, typename Body>
inline void for_pieces(int64_t head_dim, const DotLoader<T>& loader, const Body& body) {
  int64_t d = 0;
  for (; d + kDotElements <= head_dim; d += kDotElements) body(d, loader);
  if (d == head_dim) return;
  const int rest = static_cast<int>(head_dim - d);
  body(d, [&](const T* p, __m512i(&x)[2]) { loader(p, rest, x); });
}

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

// scores [kRows, kStepKeys] = q times `count` keys of kPieces * 64 elements. The queries stay in
// registers. kHalf: elements exceed the true ones by 1/2.
template <int kRows, int kPieces, bool kHalf, typename T, typename Ahead>
__attribute__((noinline)) void score_whole_keys(const T* const* k, int count, const BFloat16* q,
                                                float* scores, const Ahead* ahead) {
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
    for (int row = 0; row < kRows; ++row) _mm_storeu_ps(scores + row * kStepKeys + key, x[row]);
  }
}

// The same for rows of any length, four keys at a time.
template <int kRows, bool kHalf, typename T, typename Ahead>
inline void score_key_blocks(const T* const* k, int count, const BFloat16* q, int64_t head_dim,
                             float* scores, const Ahead* ahead) {
  const DotLoader<T> loader;
  const int64_t stride = dot_stride(head_dim);
  Vec none[kRows];
  for (int row = 0; row < kRows; ++row) {
    none[row] = zero();
    for (int64_t d = 0; kHalf && d < stride; d += kHalfElements) {
      none[row] = minus_half(_mm512_loadu_si512(q + row * stride + d), none[row]);
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
          const __m512i of_row = _mm512_loadu_si512(q + row * stride + d + half * kHalfElements);
          for (int key = 0; key < kKeyBlock; ++key) {
            sums[row][key] = dot(of_row, x[key][half], sums[row][key]);
          }
        }
      }
    });
    store_sums<kRows>(sums, scores + first, kStepKeys);
  }
}

// scores [kRows, kStepKeys] = q [kRows, dot_stride(head_dim)] times `count` keys.
template <int kRows, bool kHalf, typename T, typename Ahead>
inline void score_dots(const T* const* k, int count, const BFloat16* q, int64_t head_dim,
                       float* scores, const Ahead* ahead) {
  if (head_dim == kDotElements) {
    score_whole_keys<kRows, 1, kHalf>(k, count, q, scores, ahead);
  } else if (head_dim == 2 * kDotElements) {
    score_whole_keys<kRows, 2, kHalf>(k, count, q, scores, ahead);
  } else {
    score_key_blocks<kRows, kHalf>(k, count, q, head_dim, scores, ahead);
  }
}

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

// Pairs of values from the rows of a step: their even dims and their odd ones.
template <typename T>
class RowPairs {
 public:
  explicit RowPairs(const Step<T>& step) : step_(step) {}

  template <int kPieces>
  void load(int key, int64_t d, int64_t head_dim, __m512i (&pairs)[4 * kPieces]) const {
    alignas(64) static constexpr T zeros[kPieces * kDotElements] = {};
    const T* first = step_.v[key] + d;
    const T* second = key + 1 < step_.count ? step_.v[key + 1] + d : zeros;
    const __m512i low_half = _mm512_set1_epi32(0xffff);
#pragma GCC unroll 2
    for (int piece = 0; piece < kPieces; ++piece) {
      __m512i a[2], b[2];
      if (const int64_t left = head_dim - d; kPieces == 1 && left < kDotElements) {
        loader_(first, static_cast<int>(left), a);
        loader_(second, static_cast<int>(left), b);
      } else {
        loader_(first + piece * kDotElements, a);
        loader_(second + piece * kDotElements, b);
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        // (low_half & x) | (~low_half & y)
        pairs[4 * piece + 2 * half] =
            _mm512_ternarylogic_epi32(low_half, a[half], _mm512_slli_epi32(b[half], 16), 0xca);
        pairs[4 * piece + 2 * half + 1] =
            _mm512_ternarylogic_epi32(low_half, _mm512_srli_epi32(a[half], 16), b[half], 0xca);
      }
    }
  }

 private:
  const Step<T>& step_;
  const DotLoader<T> loader_{};
};

// Those that were loaded before: v [kStepKeys / 2, dot_stride(head_dim)].
struct PackedPairs {
  const uint32_t* v;

  template <int kPieces>
  void load(int key, int64_t d, int64_t head_dim, __m512i (&pairs)[4 * kPieces]) const {
    const uint32_t* of_key = v + key / 2 * dot_stride(head_dim) + d;
    for (int i = 0; i < 4 * kPieces; ++i) pairs[i] = _mm512_load_si512(of_key + i * kLanes);
  }
};

// acc [kRows, padded(head_dim)] = rescale * acc + terms [kRows, 2, kStepKeys], of which kTerms are
// used, times `count` values, of kPieces * 64 elements at a time, the last of which may be shorter.
// Accumulators are in the lane order of bfloat16. kHalf: elements exceed the true ones by 1/2.
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
      __m512i pairs[4 * kPieces];
      values.template load<kPieces>(key, d, head_dim, pairs);
#pragma GCC unroll 8
      for (int i = 0; i < 4 * kPieces; ++i) {
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
          for (int term = 0; term < kTerms; ++term) {
            const __m512i weight = broadcast_pair(terms + (2 * row + term) * kStepKeys + key);
            sums[row][i] = dot(weight, pairs[i], sums[row][i]);
          }
        }
      }
    }
    const int64_t stride = padded(head_dim), left = (stride - d) / kLanes;
    for (int row = 0; row < kRows; ++row) {
      const Vec factor = broadcast(rescale[row]);
      float* out = acc + row * stride + d;
      for (int i = 0; i < 4 * kPieces && i < left; ++i) {
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
      : RowsAttention<T>(p, rows, workspace),
        packed_v_(reinterpret_cast<uint32_t*>(state_.end)),
        packed_k_(
            reinterpret_cast<BFloat16*>(packed_v_ + kStepKeys / 2 * dot_stride(p.head_dim_v))) {}

  static size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
    return row_state_bytes(p, num_rows) +
           kStepKeys * 2 * (dot_stride(p.head_dim_v) + dot_stride(p.head_dim));
  }

  // The partial state of the rows over their keys in `range`: see Kernels::attend. False if a NaN
  // may come from an infinite value, with a weight whose second term is 0 or less its half.
  bool run(KeyRange range, float* o, float* lse) {
    load_queries();
    this->walk_in_order(range, [this](auto&&... arguments) { attend_step(arguments...); });
    state_.template normalise<BFloat16>(o, lse);
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
          score_dots<kRows, kHalf>(converted, step.count, q, p_.head_dim, scores, ahead_of(row));
          return;
        }
      }
      score_dots<kRows, kHalf>(step.k, step.count, q, p_.head_dim, scores, ahead_of(row));
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
      float* acc = state_.acc + row * padded(p_.head_dim_v);
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
                                                 acc + first * padded(p_.head_dim_v), lines);
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

  // The keys of `step` as bfloat16, in the order of memory.
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
        __m512i pairs[4];
        values.template load<1>(key, d, p_.head_dim_v, pairs);
        for (int i = 0; i < 4; ++i) {
          _mm512_store_si512(packed_v_ + key / 2 * stride + d + i * kLanes, pairs[i]);
        }
      }
    }
  }

  uint32_t* const packed_v_;  // [kStepKeys / 2, dot_stride(head_dim_v)]
  BFloat16* const packed_k_;  // [kStepKeys, dot_stride(head_dim)], of keys of 8 bits
};

}  // namespace
}  // namespace tree_attention::cpu
