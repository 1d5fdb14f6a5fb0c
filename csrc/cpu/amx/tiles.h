// SPDX-License-Identifier: BSD-3-Clause
//
// Operands and products of few rows in AMX tiles.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/bf16/eight_bits.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

// Tiles: 0, 1 scores^T; 2 keys or values; 3 queries^T; 4, 5 o; 6, 7 the two terms of P. A block of
// few rows has smaller ones: loads and stores cost by the row.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  // `columns` of scores^T, of 4 bytes each.
  TileConfig(int num_rows, int columns) {
    for (int tile = 0; tile < 4; ++tile) shape(tile, kTileRows, tile == 2 ? 64 : 4 * columns);
    for (int tile = 4; tile < 8; ++tile) shape(tile, num_rows, 64);
  }

 private:
  void shape(int tile, int num_rows, int num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    bytes_per_row[tile] = static_cast<uint16_t>(num_bytes);
  }
};

// The tile intrinsics do not tell the compiler that they read memory.
inline void finish_stores() { asm volatile("" ::: "memory"); }

struct Matrices {
  uint32_t* q;           // [row blocks, head_dim / 32, 16 pairs of dims, columns]
  uint32_t* v;           // [head_dim_v / 32, even and odd dims, 16 pairs of keys, 16 dims]
  BFloat16* k;           // [buffers, 32 keys, head_dim]: those that are not used where they lie
  float* scores;         // [2, 32 keys, columns]
  int32_t* products;     // [32 keys, 2 groups of rows, 16]: those of digits, of keys of int8
  uint16_t *high, *low;  // [16 rows, 32 keys]: the two terms of P

  // Keys of 8 bits are converted while those of the step before are used.
  static int64_t key_buffers(const DecodeParams& p) {
    return p.kv_dtype == DataType::kBFloat16 ? 1 : 2;
  }
  static int64_t product_bytes(const DecodeParams& p) {
    return p.kv_dtype == DataType::kInt8 ? kStepKeys * 2 * kTileRows * 4 : 0;
  }
  static int64_t row_blocks(int64_t num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }
  static size_t bytes(const DecodeParams& p, int64_t num_rows) {
    return (row_blocks(num_rows) * kTileRows + key_buffers(p) * kStepKeys) * padded(p.head_dim) *
               2 +
           kStepKeys * padded(p.head_dim_v) * 2 + 2 * kStepKeys * kTileRows * 4 + product_bytes(p) +
           2 * kTileRows * kStepKeys * 2;
  }
  Matrices(const DecodeParams& p, int64_t num_rows, char* memory) {
    const auto take = [&](int64_t bytes) {
      char* taken = memory;
      memory += bytes;
      return taken;
    };
    q = reinterpret_cast<uint32_t*>(
        take(row_blocks(num_rows) * kTileRows * padded(p.head_dim) * 2));
    k = reinterpret_cast<BFloat16*>(take(key_buffers(p) * kStepKeys * padded(p.head_dim) * 2));
    v = reinterpret_cast<uint32_t*>(take(kStepKeys * padded(p.head_dim_v) * 2));
    scores = reinterpret_cast<float*>(take(2 * kStepKeys * kTileRows * 4));
    products = reinterpret_cast<int32_t*>(take(product_bytes(p)));
    high = reinterpret_cast<uint16_t*>(take(kTileRows * kStepKeys * 2));
    low = reinterpret_cast<uint16_t*>(take(kTileRows * kStepKeys * 2));
  }
};

// The queries of `rows` as Matrices::q, in blocks of `columns` rows, paired as keys of type T are.
template <typename T>
inline void pack_queries(const DecodeParams& p, const Rows& rows, int columns, uint32_t* out) {
  const int64_t num_pairs = p.head_dim / 2, block_size = num_pairs * columns;
  __builtin_memset(out, 0, Matrices::row_blocks(rows.count) * block_size * sizeof(uint32_t));
  for (int64_t row = 0; row < rows.count; ++row) {
    const BFloat16* source = query_of_row<BFloat16>(p, rows, row);
    uint32_t* column = out + row / columns * block_size + row % columns;
    for (int64_t d = 0; d < p.head_dim; d += kTilePair) {
      const BFloat16* pairs = source + d;
      alignas(64) BFloat16 paired[kTilePair];
      if constexpr (kIsScaled<T>) {
        pairs = paired;
        _mm512_store_si512(paired, interleave_halves(_mm512_loadu_si512(source + d)));
      }
      for (int i = 0; i < kTileRows; ++i, column += columns) {
        __builtin_memcpy(column, pairs + 2 * i, sizeof(uint32_t));
      }
    }
  }
}

// The 16 keys from `first` as a matrix: in place if they lie at equal distances, else copied.
template <typename T>
inline const T* key_matrix(const DecodeParams& p, const Step<T>& step, int first, T* copy,
                           int64_t& stride) {
  if (step.count >= first + kTileRows) {
    stride = step.k[first + 1] - step.k[first];
    bool regular = true;
    for (int i = first + 2; i < first + kTileRows; ++i) {
      regular &= step.k[i] - step.k[i - 1] == stride;
    }
    if (regular) return step.k[first];
  }
  stride = p.head_dim;
  for (int i = 0; i < kTileRows; ++i) {
    __builtin_memcpy(copy + i * stride, step.k[first + i < step.count ? first + i : step.count - 1],
                     stride * sizeof(T));
  }
  return copy;
}

// Fetches the keys and values of the next step, and as many lines of the window, while a step is
// computed. A core keeps only 16 lines in flight, so that fetching overlaps with computing only
// where it is spread over all of it: each part of the computing says how much of it it is.
template <typename T>
class Prefetcher {
 public:
  // The relative costs of the parts of a step: of the products of a block of rows and kTilePair
  // dims, of interleaving kTilePair dims of two values, of the weights of a block of rows.
  static constexpr int kScores = 12, kValues = 16, kInterleaving = kIsScaled<T> ? 4 : 1,
                       kWeights = 48;

  // Keys are fetched, or, given next_keys, converted to there.
  Prefetcher(const DecodeParams& p, int64_t num_blocks, const Step<T>& near, Window<T>* window,
             BFloat16* next_keys)
      : near_(near),
        window_(window),
        next_keys_(next_keys),
        k_end_(p.head_dim),
        v_end_(p.head_dim_v) {
    const int k_pairs = p.head_dim / kTilePair, v_pairs = p.head_dim_v / kTilePair;
    const int64_t longest = k_end_ > v_end_ ? k_end_ : v_end_;
    units_ = kStepKeys / kUnitKeys * static_cast<int>((longest + kLine - 1) / kLine);
    cost_ = static_cast<int>(num_blocks) * (kScores * k_pairs + kValues * v_pairs + kWeights) +
            kTileRows * kInterleaving * v_pairs;
  }

  // Fetches the share of all lines that `cost` is of the step's.
  void fetch(int cost) {
    for (due_ += cost * units_; due_ >= cost_; due_ -= cost_) fetch_unit();
  }

  // Fetches what is left.
  void finish() {
    while (key_ < kStepKeys) fetch_unit();
  }

 private:
  static constexpr int kUnitKeys = 4, kLine = kLineBytes / sizeof(T);

  void fetch_unit() {
    if (key_ == kStepKeys) return;
    if constexpr (kIsScaled<T>) {
      const int64_t end = d_ + kLine < k_end_ ? d_ + kLine : k_end_;
      if (next_keys_ != nullptr) {
        convert_keys(near_, key_, key_ + kUnitKeys, d_, end, k_end_, next_keys_);
      }
    }
    for (int i = 0; i < kUnitKeys; ++i) {
      if (next_keys_ == nullptr && d_ < k_end_) __builtin_prefetch(near_.k[key_ + i] + d_);
      if (d_ < v_end_) __builtin_prefetch(near_.v[key_ + i] + d_);
    }
    if (window_ != nullptr) window_->fetch();
    d_ += kLine;
    if (d_ < k_end_ || d_ < v_end_) return;
    d_ = 0;
    key_ += kUnitKeys;
  }

  const Step<T>& near_;
  Window<T>* const window_;
  BFloat16* const next_keys_;
  const int64_t k_end_, v_end_;
  int64_t d_ = 0;
  int units_, cost_, due_ = 0, key_ = 0;
};

// Two rows of V become rows of 32-bit pairs (even dims, odd dims). Keys past the end are zeros,
// since 0 * NaN is NaN.
template <typename T>
inline void interleave_values(const Step<T>& step, Prefetcher<T>& next, int64_t head_dim,
                              uint32_t* out) {
  [[maybe_unused]] const __m512i low_half = _mm512_set1_epi32(0xffff);
  [[maybe_unused]] alignas(64) static constexpr T zeros[kTilePair] = {};
  for (int i = 0; i < kTileRows; ++i) {
    next.fetch(Prefetcher<T>::kInterleaving * static_cast<int>(head_dim / kTilePair));
    const bool has_first = 2 * i < step.count, has_second = 2 * i + 1 < step.count;
    for (int64_t d = 0; d < head_dim; d += kTilePair) {
      uint32_t* tiles = out + (d / kTilePair * 2 * kTileRows + i) * kTileRows;
      if constexpr (kIsScaled<T>) {
        __m512i low, high;
        pair_rows(has_first ? step.v[2 * i] + d : zeros, has_second ? step.v[2 * i + 1] + d : zeros,
                  low, high);
        _mm512_store_si512(tiles, low);
        _mm512_store_si512(tiles + kTileRows * kTileRows, high);
      } else {
        const __m512i a = has_first ? _mm512_loadu_si512(step.v[2 * i] + d) : __m512i{};
        const __m512i b = has_second ? _mm512_loadu_si512(step.v[2 * i + 1] + d) : __m512i{};
        // (low_half & x) | (~low_half & y)
        _mm512_storeu_si512(tiles,
                            _mm512_ternarylogic_epi32(low_half, a, _mm512_slli_epi32(b, 16), 0xca));
        _mm512_storeu_si512(tiles + kTileRows * kTileRows,
                            _mm512_ternarylogic_epi32(low_half, _mm512_srli_epi32(a, 16), b, 0xca));
      }
    }
  }
}

// scores [32 keys, kColumns] = k [32 keys, head_dim] times the transpose of q [kColumns, head_dim]:
// k0 and k1 are the halves of k, and q is packed in pairs of dims (Matrices::q).
template <int kColumns, typename T>
inline void score_tiles(const BFloat16* k0, int64_t k0_stride, const BFloat16* k1,
                        int64_t k1_stride, const uint32_t* q, int64_t head_dim, float* scores,
                        Prefetcher<T>& next) {
  constexpr int kBytes = kColumns * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t d = 0; d < head_dim; d += kTilePair) {
    next.fetch(Prefetcher<T>::kScores);
    _tile_loadd(3, q + d / 2 * kColumns, kBytes);
    _tile_loadd(2, k0 + d, k0_stride * 2);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(2, k1 + d, k1_stride * 2);
    _tile_dpbf16ps(1, 2, 3);
  }
  _tile_stored(0, scores, kBytes);
  _tile_stored(1, scores + kTileRows * kColumns, kBytes);
  finish_stores();
}

// acc [16 rows, head_dim] += P [16 rows, 32 keys] times v [32 keys, head_dim], with P = m.high +
// m.low and v packed in pairs of keys (m.v).
template <typename T>
inline void value_tiles(const Matrices& m, int64_t head_dim, float* acc, Prefetcher<T>& next) {
  const int64_t stride = padded(head_dim) * static_cast<int64_t>(sizeof(float));
  finish_stores();
  _tile_loadd(6, m.high, 64);
  _tile_loadd(7, m.low, 64);
  for (int64_t d = 0; d < head_dim; d += kTilePair) {
    next.fetch(Prefetcher<T>::kValues);
    const uint32_t* v = m.v + d * kTileRows;
    _tile_loadd(4, acc + d, stride);
    _tile_loadd(5, acc + d + kLanes, stride);
    _tile_loadd(2, v, 64);
    _tile_dpbf16ps(4, 7, 2);
    _tile_dpbf16ps(4, 6, 2);
    _tile_loadd(2, v + kTileRows * kTileRows, 64);
    _tile_dpbf16ps(5, 7, 2);
    _tile_dpbf16ps(5, 6, 2);
    _tile_stored(4, acc + d, stride);
    _tile_stored(5, acc + d + kLanes, stride);
  }
  finish_stores();
}

// The pair (a, b) of each lane, rounded to bfloat16.
inline __m512i round_pairs(Vec a, Vec b) {
  return interleave_halves(reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}

// What is left of (a, b) after rounding them to `pairs`.
inline void subtract_rounded(__m512i pairs, Vec& a, Vec& b) {
  Vec rounded_a, rounded_b;
  split_bfloat16(pairs, rounded_a, rounded_b);
  a = sub(a, rounded_a);
  b = sub(b, rounded_b);
}

// Weights [32 keys, 16 rows], one key in a vector, to P [16 rows, 32 keys].
inline void store_weights(Vec (&weights)[kStepKeys], const Matrices& m) {
  __m512i pairs[kTileRows];
  uint16_t* const terms[] = {m.high, m.low};
  for (uint16_t* term : terms) {
    for (int i = 0; i < kTileRows; ++i) {
      pairs[i] = round_pairs(weights[2 * i], weights[2 * i + 1]);
      subtract_rounded(pairs[i], weights[2 * i], weights[2 * i + 1]);
    }
    transpose(pairs);
    for (int row = 0; row < kTileRows; ++row) {
      _mm512_store_si512(term + row * kStepKeys, pairs[row]);
    }
  }
}

// Transposes the 8 x 8 matrices of 32-bit elements in the two halves of the vectors, in place.
inline void transpose_halves(__m512i (&x)[8]) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  __m512i y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm512_permutex2var_epi64(x[j], low, x[j + 4]);
    y[j + 4] = _mm512_permutex2var_epi64(x[j], high, x[j + 4]);
  }
  for (int j = 0; j < 8; ++j) x[j] = y[j];
}

// Weights [32 keys, 8 rows], two keys in a vector, to P [8 rows, 32 keys].
inline void store_weights(Vec (&weights)[kStepKeys / 2], const Matrices& m) {
  Vec even[8], odd[8];  // of key pairs i and i + 8
  for (int i = 0; i < 8; ++i) {
    even[i] = _mm512_shuffle_f32x4(weights[i], weights[i + 8], 0x44);
    odd[i] = _mm512_shuffle_f32x4(weights[i], weights[i + 8], 0xee);
  }
  uint16_t* const terms[] = {m.high, m.low};
  for (uint16_t* term : terms) {
    __m512i pairs[8];
    for (int i = 0; i < 8; ++i) {
      pairs[i] = round_pairs(even[i], odd[i]);
      subtract_rounded(pairs[i], even[i], odd[i]);
    }
    transpose_halves(pairs);
    for (int row = 0; row < 8; ++row) _mm512_store_si512(term + row * kStepKeys, pairs[row]);
  }
}

// Weights [32 keys, 4 rows], four keys in a vector, to P [4 rows, 32 keys].
inline void store_weights(Vec (&weights)[kStepKeys / 4], const Matrices& m) {
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  Vec rows[2][4];  // of 16 keys
  for (int half = 0; half < 2; ++half) {
    const Vec* w = weights + 4 * half;
    const Vec a = _mm512_unpacklo_ps(w[0], w[2]), b = _mm512_unpacklo_ps(w[1], w[3]);
    const Vec c = _mm512_unpackhi_ps(w[0], w[2]), d = _mm512_unpackhi_ps(w[1], w[3]);
    const Vec by_row[4] = {_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b),
                           _mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)};
    for (int row = 0; row < 4; ++row) {
      rows[half][row] = _mm512_permutexvar_ps(in_order, by_row[row]);
    }
  }
  const auto widen = [](__m256i x, Vec& wide) {
    wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  };
  for (int row = 0; row < 4; ++row) {
    const Vec a = rows[0][row], b = rows[1][row];
    const __m512i high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
    Vec high_a, high_b;
    widen(_mm512_castsi512_si256(high), high_a);
    widen(_mm512_extracti64x4_epi64(high, 1), high_b);
    _mm512_store_si512(m.high + row * kStepKeys, high);
    _mm512_store_si512(m.low + row * kStepKeys, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                                                    sub(b, high_b), sub(a, high_a))));
  }
}

// kColumns numbers, repeated to fill a vector.
template <int kColumns>
inline Vec load_columns(const float* p) {
  if constexpr (kColumns == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
  if constexpr (kColumns == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
  return load(p);
}

// What load_columns gives for a number per key: those of the keys in a vector, in each one's lanes.
template <int kColumns>
inline Vec load_keys(const float* p) {
  if constexpr (kColumns == 4) {
    const __m512i key_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(p)), key_of_lane);
  }
  if constexpr (kColumns == 8) {
    return _mm512_insertf32x8(broadcast(p[0]), _mm256_set1_ps(p[1]), 1);
  }
  return broadcast(p[0]);
}

// The maximum and the sum over the keys in a vector [16 / kColumns keys, kColumns], in all of its
// lanes.
template <int kColumns>
inline Vec max_of_keys(Vec x) {
  if constexpr (kColumns <= 8) x = max_keep_nan(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kColumns == 4) x = max_keep_nan(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return x;
}
template <int kColumns>
inline Vec sum_of_keys(Vec x) {
  if constexpr (kColumns <= 8) x = add(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kColumns == 4) x = add(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return x;
}

}  // namespace
}  // namespace tree_attention::cpu
