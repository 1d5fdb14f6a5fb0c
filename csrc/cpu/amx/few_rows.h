// SPDX-License-Identifier: BSD-3-Clause
//
// Few rows with both products in AMX tiles, for bfloat16 queries and keys that all rows see, of
// bfloat16 or of 8 bits, which are converted to it without an error. State and lane order are those
// of VectorAttention, so that keys at the edges of ranges can take that path. Scores^T [16 keys, 16
// rows] = K Q^T takes K as it lies in memory; o [16 rows, 16 dims] += P V takes V as pairs of keys.
// P is split into two bfloat16 terms (relative error 2^-17): rounding it to one, as the matrix unit
// wants it, would cost half of the digits of o.
#pragma once

#include <immintrin.h>

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/amx/digits.h"
#include "cpu/amx/packing.h"
#include "cpu/amx/prefetch.h"
#include "cpu/amx/tiles.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/attention.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/simd_math.h"
#include "cpu/vector/softmax.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

template <typename T>
class TileAttention : VectorAttention<T> {
 public:
  TileAttention(const DecodeParams& p, const Rows& rows, void* workspace)
      : VectorAttention<T>(p, rows, workspace),
        m_(p, rows.count, state_.end),
        num_blocks_(FewRowsMemory::row_blocks(rows.count)),
        scale_(adjusted_ ? 1.0f : score_scale(p)) {}

  // The partial state of the rows over their keys in `range`: see Kernels::attend.
  void run(KeyRange range, float* o, float* lse) {
    VectorAttention<T>::run(range, o, lse, [this](int64_t begin, int64_t end, int64_t limit) {
      attend_shared(begin, end, limit);
    });
  }

 private:
  using VectorAttention<T>::p_, VectorAttention<T>::rows_, VectorAttention<T>::state_,
      VectorAttention<T>::keys_, VectorAttention<T>::adjusted_;

  void attend_shared(int64_t begin, int64_t end, int64_t limit) {
    // Tiles cost the same for one key as for 32.
    const bool few_keys = end - begin < kTileRows && rows_.count <= kTileRows;
    if (few_keys || p_.head_dim % kTilePair != 0 || p_.head_dim_v % kTilePair != 0) {
      VectorAttention<T>::attend_shared(begin, end, limit);
      return;
    }
    double sum[kMaxRows];
    __builtin_memcpy(sum, state_.sum, rows_.count * sizeof(double));
    if (rows_.count <= 4) {
      attend_columns<4>(begin, end, limit);
    } else if (rows_.count <= 8) {
      attend_columns<8>(begin, end, limit);
    } else {
      attend_columns<kTileRows>(begin, end, limit);
    }
    const int64_t size = rows_.count * padded(p_.head_dim_v);
    if (!has_nan(state_.acc, size)) return;
    // The NaN may come from an infinite value and a weight whose second term is 0. So compute once
    // more, from the state after the last flush, with weights of one term.
    __builtin_memcpy(state_.sum, sum, rows_.count * sizeof(double));
    __builtin_memcpy(state_.base, state_.total_base, rows_.count * sizeof(float));
    __builtin_memset(state_.acc, 0, size * sizeof(float));
    VectorAttention<T>::attend_shared(begin, end, limit);
  }

  // Blocks of kColumns rows: a vector holds the scores of all of them for 16 / kColumns keys.
  template <int kColumns>
  void attend_columns(int64_t begin, int64_t end, int64_t limit) {
    if constexpr (__is_same(T, Int8) && kColumns < kTileRows) {
      auto* digits = reinterpret_cast<int8_t*>(m_.q);
      if (p_.head_dim >= kTileBytes && pack_digits<kColumns>(p_, rows_, digits, digit_weights_)) {
        attend_packed<kColumns, true>(begin, end, limit);
        return;
      }
    }
    pack_queries<T>(p_, rows_, rows_.count, kColumns, m_.q);
    attend_packed<kColumns, false>(begin, end, limit);
  }

  // attend_columns with the queries, or their digits, in m_.q.
  template <int kColumns, bool kUsesDigits>
  void attend_packed(int64_t begin, int64_t end, int64_t limit) {
    const TileConfig config(rows_.count < kTileRows ? static_cast<int>(rows_.count) : kTileRows,
                            kUsesDigits ? kDigitColumns : kColumns);
    finish_stores();
    _tile_loadconfig(&config);
    constexpr bool kConverts = kIsScaled<T> && !kUsesDigits;
    int buffer = 0;  // of the converted keys of the step
    for_steps<T, Window<T>>(
        p_, keys_, begin, end, limit,
        [&](int64_t key, const Step<T>& step, const Step<T>& next, Window<T>* window) {
          BFloat16 *const keys = keys_of(buffer), *next_keys = nullptr;
          if constexpr (kConverts) {
            if (key == begin) convert_keys(step, 0, kStepKeys, 0, p_.head_dim, p_.head_dim, keys);
            buffer = 1 - buffer;
            next_keys = keys_of(buffer);
          }
          KeyTile k[2];
          key_tiles<kConverts>(p_, step, keys, k);
          finish_stores();
          Prefetcher<T> prefetcher(p_, num_blocks_, next, window, next_keys);
          attend_step<kColumns, kUsesDigits>(key, step, k, prefetcher);
          if constexpr (kConverts) prefetcher.finish();
        });
    _tile_release();
  }

  template <int kColumns, bool kUsesDigits>
  void attend_step(int64_t key, const Step<T>& step, const KeyTile (&k)[2],
                   Prefetcher<T>& prefetcher) {
    const auto score_rows = [&](int64_t block) {
      if constexpr (kUsesDigits) {
        score_digits<kColumns>(k, reinterpret_cast<int8_t*>(m_.q), digit_weights_, p_.head_dim,
                               m_.products, m_.scores, prefetcher);
      } else {
        score_tiles<kColumns>(k, block, prefetcher);
      }
    };
    // The matrix unit scores the next rows while the vector units weigh these.
    score_rows(0);
    pack_values(step, p_.head_dim_v, prefetcher, m_.v);
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (block + 1 < num_blocks_) score_rows(block + 1);
      const int64_t first = block * kTileRows;
      const int64_t last = first + kTileRows < rows_.count ? first + kTileRows : rows_.count;
      weigh_rows<kColumns>(key, step, first, last, prefetcher);
      value_tiles(first, prefetcher);
    }
  }

  BFloat16* keys_of(int buffer) const { return m_.k + buffer * kStepKeys * p_.head_dim; }
  float* scores_of(int64_t block) const { return m_.scores + block % 2 * kStepKeys * kTileRows; }

  // scores [32 keys, kColumns] = k [2 x 16 keys, head_dim] times the transpose of a block of
  // queries.
  template <int kColumns>
  void score_tiles(const KeyTile (&k)[2], int64_t block, Prefetcher<T>& next) const {
    constexpr int kBytes = kColumns * sizeof(float);
    const int64_t row_bytes = p_.head_dim * sizeof(BFloat16);
    const uint32_t* q = m_.q + block * kTileRows * p_.head_dim / 2;
    const KeyTile first = k[0], second = k[1];
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < row_bytes; d += 64, q += kTileRows * kColumns) {
      next.fetch(Prefetcher<T>::kScores);
      _tile_loadd(3, q, kBytes);
      _tile_loadd(2, first.rows + d, first.stride);
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(2, second.rows + d, second.stride);
      _tile_dpbf16ps(1, 2, 3);
    }
    float* scores = scores_of(block);
    _tile_stored(0, scores, kBytes);
    _tile_stored(1, scores + kTileRows * kColumns, kBytes);
    finish_stores();
  }

  // acc [16 rows, head_dim_v] += P [16 rows, 32 keys] times the packed values, from row `first` on.
  void value_tiles(int64_t first, Prefetcher<T>& next) const {
    const int64_t row_size = padded(p_.head_dim_v), head_dim = p_.head_dim_v;
    const int64_t stride = row_size * static_cast<int64_t>(sizeof(float));
    float* acc = state_.acc + first * row_size;
    const uint32_t* v = m_.v;
    finish_stores();
    _tile_loadd(6, m_.high, 64);
    _tile_loadd(7, m_.low, 64);
    for (int64_t d = 0; d < head_dim; d += kTilePair, v += 2 * kTileWords) {
      next.fetch(Prefetcher<T>::kValues);
      _tile_loadd(4, acc + d, stride);
      _tile_loadd(5, acc + d + kLanes, stride);
      _tile_loadd(2, v, 64);
      _tile_dpbf16ps(4, 7, 2);
      _tile_dpbf16ps(4, 6, 2);
      _tile_loadd(2, v + kTileWords, 64);
      _tile_dpbf16ps(5, 7, 2);
      _tile_dpbf16ps(5, 6, 2);
      _tile_stored(4, acc + d, stride);
      _tile_stored(5, acc + d + kLanes, stride);
    }
    finish_stores();
  }

  // softmax_row for rows [first, last), and the rescaling of their acc. Lanes are rows here, so
  // that maximum and sum over keys need hardly a shuffle.
  template <int kColumns>
  void weigh_rows(int64_t key, const Step<T>& step, int64_t first, int64_t last,
                  Prefetcher<T>& next) {
    constexpr int kVectors = kStepKeys * kColumns / kLanes, kVectorKeys = kLanes / kColumns;
    float* scores = scores_of(first / kTileRows);
    if constexpr (kIsScaled<T>) {
      for (int i = 0; i < kVectors; ++i) {
        float* of_keys = scores + i * kLanes;
        store(of_keys, mul(load(of_keys), load_keys<kColumns>(step.k_scale + i * kVectorKeys)));
      }
    }
    if (adjusted_) adjust_columns<kColumns>(p_, rows_, first, last, key, step.count, scores);
    const Vec scale = broadcast(scale_);

    // Both ends, since the scale may be negative. Keys past the last one repeat it.
    Vec largest = load(scores), smallest = largest;
    for (int i = 1; i < kVectors; ++i) {
      largest = max_keep_nan(largest, load(scores + i * kLanes));
      smallest = min_keep_nan(smallest, load(scores + i * kLanes));
    }
    const Vec old_base = load_columns<kColumns>(state_.base + first);
    const Vec top = max_keep_nan(
        old_base, max_of_keys<kColumns>(max_keep_nan(mul(largest, scale), mul(smallest, scale))));
    const __mmask16 above =
        _mm512_cmp_ps_mask(top, add(old_base, broadcast(kRowSlack)), _CMP_NLE_UQ);
    const Vec new_base = _mm512_mask_mov_ps(old_base, above, top);
    // -inf - -inf would be NaN.
    const Vec base = select_below(new_base, -FLT_MAX, zero(), new_base);
    const Vec rescale = exp2_nonpositive(sub(old_base, base));

    Vec sum = zero(), weights[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      next.fetch(Prefetcher<T>::kWeights / kVectors);
      // Not fused: base is a rounded product, and exact ones exceed it by more than any exponent.
      weights[i] = exp2_nonpositive(sub(mul(load(scores + i * kLanes), scale), base));
      const int lanes = (step.count - i * kVectorKeys) * kColumns;
      if (lanes < kLanes) weights[i] = _mm512_maskz_mov_ps(first_lanes(lanes), weights[i]);
      sum = add(sum, weights[i]);
      if constexpr (kIsScaled<T>) {
        weights[i] = mul(weights[i], load_keys<kColumns>(step.v_scale + i * kVectorKeys));
      }
    }
    store_weights(weights, m_);
    sum = sum_of_keys<kColumns>(sum);
    const __mmask16 columns = first_lanes(kColumns);
    _mm512_mask_storeu_ps(state_.base + first, columns, new_base);
    const auto add_sum = [&](int begin, __m256 sums, __m256 factors) {
      double* total = state_.sum + first + begin;
      const auto mask = static_cast<__mmask8>(columns >> begin);
      _mm512_mask_storeu_pd(total, mask,
                            _mm512_fmadd_pd(_mm512_maskz_loadu_pd(mask, total),
                                            _mm512_cvtps_pd(factors), _mm512_cvtps_pd(sums)));
    };
    add_sum(0, _mm512_castps512_ps256(sum), _mm512_castps512_ps256(rescale));
    add_sum(8, _mm512_extractf32x8_ps(sum, 1), _mm512_extractf32x8_ps(rescale, 1));
    float factors[kTileRows];
    store(factors, rescale);
    for (int64_t row = first; row < last; ++row) {
      if (factors[row - first] == 1.0f) continue;
      float* acc = state_.acc + row * padded(p_.head_dim_v);
      for (int64_t d = 0; d < p_.head_dim_v; d += kLanes) {
        store(acc + d, mul(load(acc + d), broadcast(factors[row - first])));
      }
    }
  }

  const FewRowsMemory m_;
  const int64_t num_blocks_;
  const float scale_;  // of scores that are not adjusted
  float digit_weights_[kDigits * kTileRows / 2] = {};
};

}  // namespace
}  // namespace tree_attention::cpu
