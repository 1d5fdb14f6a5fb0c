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
      : VectorAttention<T>(p, rows, workspace), m_(p, rows.count, state_.end) {}

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
    __builtin_memcpy(state_.max, state_.total_max, rows_.count * sizeof(float));
    __builtin_memset(state_.acc, 0, size * sizeof(float));
    VectorAttention<T>::attend_shared(begin, end, limit);
  }

  // Whether scores of blocks of kColumns rows may come from digits.
  template <int kColumns>
  static constexpr bool kMayUseDigits = __is_same(T, Int8) && kColumns < kTileRows;

  // Blocks of kColumns rows: a vector holds the scores of all of them for 16 / kColumns keys.
  template <int kColumns>
  void attend_columns(int64_t begin, int64_t end, int64_t limit) {
    if constexpr (kMayUseDigits<kColumns>) {
      float weights[kDigits * kColumns] = {};
      if (p_.head_dim >= kTileBytes &&
          pack_digits<kColumns>(p_, rows_, reinterpret_cast<int8_t*>(m_.q), weights)) {
        attend_packed<kColumns>(begin, end, limit, weights);
        return;
      }
    }
    pack_queries<T>(p_, rows_, kColumns, m_.q);
    attend_packed<kColumns>(begin, end, limit, nullptr);
  }

  // attend_columns with the queries in m_.q, of which `weights` are those of the digits, or null.
  template <int kColumns>
  void attend_packed(int64_t begin, int64_t end, int64_t limit, const float* weights) {
    const TileConfig config(rows_.count < kTileRows ? static_cast<int>(rows_.count) : kTileRows,
                            weights == nullptr ? kColumns : kDigitColumns);
    finish_stores();
    _tile_loadconfig(&config);
    [[maybe_unused]] int buffer = 0;  // of the keys of the step
    bool is_first = true;
    for_steps<T, Window<T>>(
        p_, keys_, begin, end, limit,
        [&](int64_t key, const Step<T>& step, const Step<T>& next, Window<T>* window) {
          if constexpr (kIsScaled<T>) {
            if (is_first && weights == nullptr) {
              convert_keys(step, 0, kStepKeys, 0, p_.head_dim, p_.head_dim, m_.k);
            }
          }
          is_first = false;
          attend_step<kColumns>(key, step, next, window, buffer, weights);
          buffer = 1 - buffer;
        });
    _tile_release();
  }

  template <int kColumns>
  void attend_step(int64_t key, const Step<T>& step, const Step<T>& next, Window<T>* window,
                   int buffer, const float* weights) {
    if constexpr (kMayUseDigits<kColumns>) {
      if (weights != nullptr) {
        attend_digits<kColumns>(key, step, next, window, weights);
        return;
      }
    }
    int64_t stride[2];
    const BFloat16* k[2];
    const auto keys_of = [&](int i) { return m_.k + i * kStepKeys * p_.head_dim; };
    for (int i = 0; i < 2; ++i) {
      if constexpr (kIsScaled<T>) {
        k[i] = keys_of(buffer) + i * kTileRows * p_.head_dim;
        stride[i] = p_.head_dim;
      } else {
        k[i] = key_matrix(p_, step, i * kTileRows, m_.k + i * kTileRows * p_.head_dim, stride[i]);
      }
    }
    finish_stores();
    const int64_t num_blocks = Matrices::row_blocks(rows_.count);
    Prefetcher<T> prefetcher(p_, num_blocks, next, window,
                             kIsScaled<T> ? keys_of(1 - buffer) : nullptr);
    const auto score_rows = [&](int64_t block) {
      score_tiles<kColumns>(k[0], stride[0], k[1], stride[1],
                            m_.q + block * kTileRows * p_.head_dim / 2, p_.head_dim,
                            m_.scores + block % 2 * kStepKeys * kTileRows, prefetcher);
    };
    // The matrix unit scores the next rows while the vector units weigh these.
    score_rows(0);
    interleave_values(step, prefetcher, p_.head_dim_v, m_.v);
    for (int64_t block = 0; block < num_blocks; ++block) {
      if (block + 1 < num_blocks) score_rows(block + 1);
      const int64_t first = block * kTileRows;
      const int64_t last = first + kTileRows < rows_.count ? first + kTileRows : rows_.count;
      weigh_rows<kColumns>(key, step, first, last, prefetcher);
      value_tiles(m_, p_.head_dim_v, state_.acc + first * padded(p_.head_dim_v), prefetcher);
    }
    if constexpr (kIsScaled<T>) prefetcher.finish();
  }

  // attend_step for few rows and keys of int8, whose scores come from digits.
  template <int kColumns>
  void attend_digits(int64_t key, const Step<T>& step, const Step<T>& next, Window<T>* window,
                     const float* weights) {
    int64_t stride[2];
    const T* k[2];
    for (int i = 0; i < 2; ++i) {
      k[i] = key_matrix(p_, step, i * kTileRows,
                        reinterpret_cast<T*>(m_.k) + i * kTileRows * p_.head_dim, stride[i]);
    }
    finish_stores();
    Prefetcher<T> prefetcher(p_, 1, next, window, nullptr);
    score_digits<kColumns>(k[0], stride[0], k[1], stride[1], reinterpret_cast<int8_t*>(m_.q),
                           weights, p_.head_dim, m_.products, m_.scores, prefetcher);
    interleave_values(step, prefetcher, p_.head_dim_v, m_.v);
    weigh_rows<kColumns>(key, step, 0, rows_.count, prefetcher);
    value_tiles(m_, p_.head_dim_v, state_.acc, prefetcher);
  }

  // softmax_row for rows [first, last), and the rescaling of their acc. Lanes are rows here, so
  // that maximum and sum over keys need hardly a shuffle.
  template <int kColumns>
  void weigh_rows(int64_t key, const Step<T>& step, int64_t first, int64_t last,
                  Prefetcher<T>& next) {
    constexpr int kVectors = kStepKeys * kColumns / kLanes, kVectorKeys = kLanes / kColumns;
    float* scores = m_.scores + first / kTileRows % 2 * kStepKeys * kTileRows;
    if constexpr (kIsScaled<T>) {
      for (int i = 0; i < kVectors; ++i) {
        float* of_keys = scores + i * kLanes;
        store(of_keys, mul(load(of_keys), load_keys<kColumns>(step.k_scale + i * kVectorKeys)));
      }
    }
    if (adjusted_) adjust_columns<kColumns>(p_, rows_, first, last, key, step.count, scores);
    const Vec scale = broadcast(adjusted_ ? 1.0f : score_scale(p_));

    // Both ends, since the scale may be negative. Keys past the last one repeat it.
    Vec largest = load(scores), smallest = largest;
    for (int i = 1; i < kVectors; ++i) {
      largest = max_keep_nan(largest, load(scores + i * kLanes));
      smallest = min_keep_nan(smallest, load(scores + i * kLanes));
    }
    const Vec old_max = load_columns<kColumns>(state_.max + first);
    const Vec new_max = max_keep_nan(
        old_max, max_of_keys<kColumns>(max_keep_nan(mul(largest, scale), mul(smallest, scale))));
    const Vec base = select_below(new_max, -FLT_MAX, zero(), new_max);  // -inf - -inf would be NaN
    const Vec rescale = exp2_nonpositive(sub(old_max, base));

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
    _mm512_mask_storeu_ps(state_.max + first, columns, new_max);
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

  const Matrices m_;
};

}  // namespace
}  // namespace tree_attention::cpu
