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
constexpr int kHalf = kDotElements / 2;

// Queries are kept as they are, in rows of this length, padded with zeros.
inline int64_t dot_stride(int64_t head_dim) {
  return (head_dim + kDotElements - 1) / kDotElements * kDotElements;
}

// The lines of the keys and values two steps ahead, fetched into the second-level cache while as
// many lines are used. Inlined, because gcc takes a call that only prefetches for one without
// effect.
template <typename T>
class LinesAhead {
 public:
  explicit LinesAhead(const DecodeParams& p)
      : k_bytes_(p.head_dim * sizeof(T)), v_bytes_(p.head_dim_v * sizeof(T)) {}

  static int64_t num_keys() { return kStepKeys; }

  // Makes these the lines of keys [begin, end).
  void locate(const Keys<T>& keys, int64_t begin, int64_t end) {
    const int count = static_cast<int>(end - begin);
    keys.for_addresses(begin, count, [&](int i, const T* k, const T* v) {
      k_[i] = k;
      v_[i] = v;
    });
    for (int i = count; i < kStepKeys; ++i) {
      k_[i] = k_[count - 1];
      v_[i] = v_[count - 1];
    }
    if constexpr (kIsScaled<T>) keys.prefetch_scales(begin, count);
  }

  __attribute__((always_inline)) void fetch_key(int key) const { fetch(k_[key], k_bytes_); }
  __attribute__((always_inline)) void fetch_value(int key) const { fetch(v_[key], v_bytes_); }

 private:
  __attribute__((always_inline)) static void fetch(const T* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const char*>(row) + i, 0, 2);
    }
  }

  const int64_t k_bytes_, v_bytes_;
  const T *k_[kStepKeys], *v_[kStepKeys];
};

// Loads kDotElements elements, or the first n, as bfloat16.
template <typename T>
class DotLoader;

template <>
class DotLoader<BFloat16> {
 public:
  void operator()(const BFloat16* p, __m512i (&x)[2]) const {
    x[0] = _mm512_loadu_si512(p);
    x[1] = _mm512_loadu_si512(p + kHalf);
  }
  void operator()(const BFloat16* p, int n, __m512i (&x)[2]) const {
    x[0] = load_16_bit(p, n);
    x[1] = n <= kHalf ? __m512i{} : load_16_bit(p + kHalf, n - kHalf);
  }
};

// The bytes of the bfloat16 of every element of 8 bits by its last seven; `low` and `high` of those
// with the first bit follow those without.
struct Int8Table {
  alignas(64) uint8_t low[256] = {}, high[256] = {};

  constexpr Int8Table() {
    for (int i = 0; i < 256; ++i) {
      const auto value = static_cast<float>(i < 128 ? i : i - 256);
      const auto bits = __builtin_bit_cast(uint32_t, value);
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
constexpr Int8Table kInt8Table;

template <typename T>
  requires(sizeof(T) == 1)
class DotLoader<T> {
 public:
  DotLoader() {
    const auto load_table = [](const uint8_t* table, __m512i(&out)[kVectors]) {
      for (int i = 0; i < kVectors; ++i) out[i] = _mm512_load_si512(table + 64 * i);
    };
    if constexpr (__is_same(T, Int8)) {
      load_table(kInt8Table.low, low_);
      load_table(kInt8Table.high, high_);
    } else {
      load_table(kFloat8Table.low, low_);
      load_table(kFloat8Table.high, high_);
    }
  }

  void operator()(const T* p, __m512i (&x)[2]) const { convert(_mm512_loadu_si512(p), x); }
  void operator()(const T* p, int n, __m512i (&x)[2]) const {
    const __mmask64 first = n >= kDotElements ? ~__mmask64{0} : (__mmask64{1} << n) - 1;
    convert(_mm512_maskz_loadu_epi8(first, p), x);
  }

 private:
  // A float8 with the first bit is the one without it and a sign.
  static constexpr int kVectors = __is_same(T, Int8) ? 4 : 2;

  void convert(__m512i bytes, __m512i (&x)[2]) const {
    // unpack takes the low halves of the 128-bit lanes first.
    bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
    __m512i low = _mm512_permutex2var_epi8(low_[0], bytes, low_[1]);
    __m512i high = _mm512_permutex2var_epi8(high_[0], bytes, high_[1]);
    if constexpr (__is_same(T, Int8)) {
      const __mmask64 negative = _mm512_movepi8_mask(bytes);
      low =
          _mm512_mask_blend_epi8(negative, low, _mm512_permutex2var_epi8(low_[2], bytes, low_[3]));
      high = _mm512_mask_blend_epi8(negative, high,
                                    _mm512_permutex2var_epi8(high_[2], bytes, high_[3]));
    } else {
      const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
      high = _mm512_ternarylogic_epi32(high, bytes, sign, 0xf8);  // high | (bytes & sign)
    }
    x[0] = _mm512_unpacklo_epi8(low, high);
    x[1] = _mm512_unpackhi_epi8(low, high);
  }

  __m512i low_[kVectors], high_[kVectors];
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

// scores [kRows, kStepKeys] = q times the keys of a step, of kPieces * 64 elements. The queries
// stay in registers.
template <int kRows, int kPieces, typename T>
__attribute__((noinline)) void score_whole_keys(const Step<T>& step, const BFloat16* q,
                                                float* scores, const LinesAhead<T>* ahead) {
  const DotLoader<T> loader;
  __m512i of_row[kRows][2 * kPieces];
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < 2 * kPieces; ++i) {
      of_row[row][i] = _mm512_loadu_si512(q + row * kPieces * kDotElements + i * kHalf);
    }
  }
  alignas(16) float by_key[kStepKeys][4];
  for (int key = 0; key < step.count; ++key) {
    if (ahead != nullptr) ahead->fetch_key(key);
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    for (int piece = 0; piece < kPieces; ++piece) {
      __m512i x[2];
      loader(step.k[key] + piece * kDotElements, x);
      for (int half = 0; half < 2; ++half) {
        for (int row = 0; row < kRows; ++row) {
          sums[row] = dot(of_row[row][2 * piece + half], x[half], sums[row]);
        }
      }
    }
    _mm_store_ps(by_key[key], sum_lanes(sums));
  }
  for (int key = 0; key < step.count; key += 4) {
    __m128 x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm_load_ps(by_key[key + i]);
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
    for (int row = 0; row < kRows; ++row) _mm_storeu_ps(scores + row * kStepKeys + key, x[row]);
  }
}

// The same for rows of any length, four keys at a time.
template <int kRows, typename T>
inline void score_key_blocks(const Step<T>& step, const BFloat16* q, int64_t head_dim,
                             float* scores, const LinesAhead<T>* ahead) {
  const DotLoader<T> loader;
  for (int first = 0; first < step.count; first += kKeyBlock) {
    Vec sums[kRows][kKeyBlock];
    for (int row = 0; row < kRows; ++row) {
      for (int key = 0; key < kKeyBlock; ++key) sums[row][key] = zero();
    }
    for_pieces(head_dim, loader, [&](int64_t d, const auto& load_keys) {
      __m512i x[kKeyBlock][2];
      for (int key = 0; key < kKeyBlock; ++key) {
        if (ahead != nullptr && d == 0) ahead->fetch_key(first + key);
        load_keys(step.k[first + key] + d, x[key]);
      }
      for (int half = 0; half < 2; ++half) {
        for (int row = 0; row < kRows; ++row) {
          const __m512i of_row =
              _mm512_loadu_si512(q + row * dot_stride(head_dim) + d + half * kHalf);
          for (int key = 0; key < kKeyBlock; ++key) {
            sums[row][key] = dot(of_row, x[key][half], sums[row][key]);
          }
        }
      }
    });
    store_sums<kRows>(sums, scores + first, kStepKeys);
  }
}

// scores [kRows, kStepKeys] = q [kRows, dot_stride(head_dim)] times the keys of a step.
template <int kRows, typename T>
inline void score_dots(const Step<T>& step, const float* queries, int64_t row, int64_t head_dim,
                       float* scores, const LinesAhead<T>* ahead) {
  const BFloat16* q = reinterpret_cast<const BFloat16*>(queries) + row * dot_stride(head_dim);
  if (head_dim == kDotElements) {
    score_whole_keys<kRows, 1>(step, q, scores, ahead);
  } else if (head_dim == 2 * kDotElements) {
    score_whole_keys<kRows, 2>(step, q, scores, ahead);
  } else {
    score_key_blocks<kRows>(step, q, head_dim, scores, ahead);
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

// acc [kRows, padded(head_dim)] = rescale * acc + terms [kRows, 2, kStepKeys], of which kTerms are
// used, times the values of a step, of kPieces * 64 elements at a time, the last of which may be
// shorter. Accumulators are in the lane order of bfloat16.
template <int kRows, int kPieces, int kTerms, typename T>
__attribute__((noinline)) void sum_pairs(const Step<T>& step, const BFloat16* terms,
                                         const float* rescale, int64_t head_dim, float* acc,
                                         const LinesAhead<T>* ahead) {
  static_assert(kRows * kPieces <= 4);  // 16 sums
  alignas(64) static constexpr T zeros[kPieces * kDotElements] = {};
  const DotLoader<T> loader;
  const __m512i low_half = _mm512_set1_epi32(0xffff);
  const auto sum_columns = [&](int64_t d, const auto& load_values) {
    Vec sums[kRows][4 * kPieces];
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < 4 * kPieces; ++i) sums[row][i] = zero();
    }
    for (int key = 0; key < step.count; key += 2) {
      if (ahead != nullptr && d == 0) {
        ahead->fetch_value(key);
        ahead->fetch_value(key + 1);
      }
      const T* first = step.v[key] + d;
      const T* second = key + 1 < step.count ? step.v[key + 1] + d : zeros;
#pragma GCC unroll 2
      for (int piece = 0; piece < kPieces; ++piece) {
        __m512i a[2], b[2];
        load_values(first + piece * kDotElements, a);
        load_values(second + piece * kDotElements, b);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          // (low_half & x) | (~low_half & y)
          const __m512i even =
              _mm512_ternarylogic_epi32(low_half, a[half], _mm512_slli_epi32(b[half], 16), 0xca);
          const __m512i odd =
              _mm512_ternarylogic_epi32(low_half, _mm512_srli_epi32(a[half], 16), b[half], 0xca);
          const int i = 4 * piece + 2 * half;
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
            for (int term = 0; term < kTerms; ++term) {
              const __m512i weight = broadcast_pair(terms + (2 * row + term) * kStepKeys + key);
              sums[row][i] = dot(weight, even, sums[row][i]);
              sums[row][i + 1] = dot(weight, odd, sums[row][i + 1]);
            }
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
  };
  if constexpr (kPieces == 1) {
    for_pieces(head_dim, loader, sum_columns);
  } else {
    for (int64_t d = 0; d < head_dim; d += kPieces * kDotElements) sum_columns(d, loader);
  }
}

// acc [kRows, padded(head_dim)] = rescale * acc + the weights `terms` times the values of a step.
template <int kRows, int kTerms, typename T>
inline void sum_dots(const Step<T>& step, const BFloat16* terms, const float* rescale,
                     int64_t head_dim, float* acc, const LinesAhead<T>* ahead) {
  // Converting elements of 8 bits twice costs more than the order of their shorter rows gains.
  if (sizeof(T) == 1 || head_dim % (2 * kDotElements) != 0) {
    sum_pairs<kRows, 1, kTerms>(step, terms, rescale, head_dim, acc, ahead);
    return;
  }
  constexpr int kFirst = kRows < 2 ? kRows : 2;
  sum_pairs<kFirst, 2, kTerms>(step, terms, rescale, head_dim, acc, ahead);
  if constexpr (kRows > 2) {
    sum_pairs<kRows - 2, 2, kTerms, T>(step, terms + 4 * kStepKeys, rescale + 2, head_dim,
                                       acc + 2 * padded(head_dim), nullptr);
  }
}

// With products of pairs, for bfloat16 queries.
template <typename T>
class PairAttention : RowsAttention<T> {
 public:
  PairAttention(const DecodeParams& p, const Rows& rows, void* workspace)
      : RowsAttention<T>(p, rows, workspace) {}

  // The partial state of the rows over their keys in `range`: see Kernels::attend. False if a
  // value may be infinite and have a weight whose second term is 0, which gives a NaN.
  bool run(KeyRange range, float* o, float* lse) {
    load_queries();
    this->walk(
        range,
        [this](int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step) {
          attend_step(row_begin, row_end, key, step, nullptr);
        },
        [this](int64_t begin, int64_t end, int64_t limit) {
          for_steps<T, LinesAhead<T>>(
              p_, keys_, begin, end, limit,
              [&](int64_t key, const Step<T>& step, const Step<T>&, const LinesAhead<T>* ahead) {
                attend_step(0, rows_.count, key, step, ahead);
              });
        });
    state_.template normalise<BFloat16>(o, lse);
    return !weights_need_two_terms(p_) || !has_nan(o, rows_.count * p_.head_dim_v);
  }

 private:
  using RowsAttention<T>::p_, RowsAttention<T>::rows_, RowsAttention<T>::keys_,
      RowsAttention<T>::state_;

  void load_queries() {
    auto* q = reinterpret_cast<BFloat16*>(state_.q);
    for (int64_t row = 0; row < rows_.count; ++row, q += dot_stride(p_.head_dim)) {
      __builtin_memset(q, 0, dot_stride(p_.head_dim) * sizeof(BFloat16));
      __builtin_memcpy(q, query_of_row<BFloat16>(p_, rows_, row), p_.head_dim * sizeof(BFloat16));
    }
  }

  // Adds the keys of `step`, which begins at `key`, to rows [row_begin, row_end), all of which see
  // all of them.
  void attend_step(int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step,
                   const LinesAhead<T>* ahead) {
    const auto ahead_of = [&](int64_t row) { return row == row_begin ? ahead : nullptr; };
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      score_dots<kRows>(step, state_.q, row, p_.head_dim, state_.scores + row * kStepKeys,
                        ahead_of(row));
    });
    float rescale[kMaxRows];
    this->weigh_rows(row_begin, row_end, key, step, score_scale(p_), rescale);
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      alignas(64) BFloat16 terms[2 * kRows * kStepKeys];
      for (int i = 0; i < kRows; ++i) {
        split_weights(state_.scores + (row + i) * kStepKeys, terms + 2 * i * kStepKeys);
      }
      float* acc = state_.acc + row * padded(p_.head_dim_v);
      if (weights_need_two_terms(p_)) {
        sum_dots<kRows, 2>(step, terms, rescale + row, p_.head_dim_v, acc, ahead_of(row));
      } else {
        sum_dots<kRows, 1>(step, terms, rescale + row, p_.head_dim_v, acc, ahead_of(row));
      }
    });
  }
};

}  // namespace
}  // namespace tree_attention::cpu
