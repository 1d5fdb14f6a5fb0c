// SPDX-License-Identifier: BSD-3-Clause
//
// Products of small matrices of bfloat16 (bfmmla), for bfloat16 queries. A product sums over four
// elements: two rows of queries with two keys, over dims; then two rows of weights with two dims of
// values, over keys.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/bf16/terms.h"
#include "cpu/neon/bfloat16.h"
#include "cpu/vector/attention.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/products.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

constexpr int kScoredKeys = 8;  // at a time
constexpr int kQuadKeys = 4;    // that a product sums over
constexpr int kQuads = kStepKeys / kQuadKeys;

// scores [kRows, kStepKeys] = q [kRows, padded_to_pieces(head_dim)] times `count` keys.
template <int kRows, typename T>
inline void score_matrices(const T* const* k, int count, const BFloat16* q, int64_t head_dim,
                           float* scores) {
  constexpr int kPairs = (kRows + 1) / 2;
  const PieceLoader<T> loader;
  const PieceLoader<BFloat16> queries;
  const int64_t stride = padded_to_pieces(head_dim);
  for (int first = 0; first < count; first += kScoredKeys) {
    Vec sums[kPairs][kScoredKeys / 2];
    for (int pair = 0; pair < kPairs; ++pair) {
      for (int i = 0; i < kScoredKeys / 2; ++i) sums[pair][i] = zero();
    }
    for_pieces(head_dim, loader, [&](int64_t d, const auto& loads) __attribute__((always_inline)) {
      uint16x8_t rows[kPairs][4];
      for (int pair = 0; pair < kPairs; ++pair) {
        const BFloat16* even = q + 2 * pair * stride + d;  // next to itself or the next row
        queries.load_keys(even, 2 * pair + 1 < kRows ? even + stride : even, rows[pair]);
      }
      for (int i = 0; i < kScoredKeys / 2; ++i) {
        uint16x8_t keys[4];
        loads.load_keys(k[first + 2 * i] + d, k[first + 2 * i + 1] + d, keys);
        for (int part = 0; part < 4; ++part) {
          for (int pair = 0; pair < kPairs; ++pair) {
            sums[pair][i] = multiply_add(sums[pair][i], rows[pair][part], keys[part]);
          }
        }
      }
    });
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kScoredKeys / 4; ++i) {
        const Vec a = sums[row / 2][2 * i], b = sums[row / 2][2 * i + 1];
        store(scores + row * kStepKeys + first + 4 * i,
              row % 2 == 0 ? first_halves(a, b) : last_halves(a, b));
      }
    }
  }
}

// Weights of kRows rows as operands: terms [kQuads, 2 terms, row pairs] of [2 rows, kQuadKeys].
template <int kRows>
inline void split_weights(const float* weights, uint16x8_t* terms) {
  constexpr int kPairs = (kRows + 1) / 2;
  const auto round = [](Vec a, Vec b) {
    return reinterpret_cast<uint16x8_t>(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b));
  };
  for (int quad = 0; quad < kQuads; ++quad) {
    for (int pair = 0; pair < kPairs; ++pair) {
      const float* of_row = weights + 2 * pair * kStepKeys + quad * kQuadKeys;
      const Vec a = load(of_row), b = 2 * pair + 1 < kRows ? load(of_row + kStepKeys) : zero();
      const uint16x8_t first = round(a, b);
      terms[(2 * quad + 0) * kPairs + pair] = first;
      const Vec rounded_a = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16));
      const Vec rounded_b = vreinterpretq_f32_u32(vshll_high_n_u16(first, 16));
      terms[(2 * quad + 1) * kPairs + pair] = round(sub(a, rounded_a), sub(b, rounded_b));
    }
  }
}

// acc [kRows, padded_to_pieces(head_dim)] = rescale * acc + terms, of which kTerms are used, times
// the values of `num_quads` times kQuadKeys keys.
template <int kRows, int kTerms, typename T>
inline void sum_matrices(const T* const* v, int num_quads, const uint16x8_t* terms,
                         const float* rescale, int64_t head_dim, float* acc) {
  constexpr int kPairs = (kRows + 1) / 2, kSums = kPieceElements / 2;
  const int64_t stride = padded_to_pieces(head_dim);
  const auto sum_piece = [=](int64_t d, const auto& loads) __attribute__((always_inline)) {
    Vec sums[kPairs][kSums];
    for (int pair = 0; pair < kPairs; ++pair) {
      for (int i = 0; i < kSums; ++i) sums[pair][i] = zero();
    }
    for (int quad = 0; quad < num_quads; ++quad) {
      uint16x8_t values[kSums];
      loads.load_values(v + quad * kQuadKeys, d, values);
      for (int term = 0; term < kTerms; ++term) {
        for (int pair = 0; pair < kPairs; ++pair) {
          const uint16x8_t weights = terms[(2 * quad + term) * kPairs + pair];
          for (int i = 0; i < kSums; ++i) {
            sums[pair][i] = multiply_add(sums[pair][i], weights, values[i]);
          }
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec factor = broadcast(rescale[row]);
      float* out = acc + row * stride + d;
      for (int i = 0; i < kSums / 2; ++i) {
        const Vec a = sums[row / 2][2 * i], b = sums[row / 2][2 * i + 1];
        const Vec of_row = row % 2 == 0 ? first_halves(a, b) : last_halves(a, b);
        store(out + i * kLanes, fma(load(out + i * kLanes), factor, of_row));
      }
    }
  };
  for_pieces(head_dim, PieceLoader<T>(), sum_piece);
}

inline bool has_nan(const float* x, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    if (x[i] != x[i]) return true;
  }
  return false;
}

template <typename T>
class MatrixAttention : RowsAttention<T> {
 public:
  MatrixAttention(const DecodeParams& p, const Rows& rows, void* workspace)
      : RowsAttention<T>(p, rows, workspace, padded_to_pieces(p.head_dim_v)),
        zeros_(reinterpret_cast<BFloat16*>(state_.end)),
        k_copies_(zeros_ + padded_to_pieces(p.head_dim_v)),
        v_copies_(k_copies_ + kStepKeys * padded_to_pieces(p.head_dim)) {
    __builtin_memset(zeros_, 0, padded_to_pieces(p.head_dim_v) * sizeof(BFloat16));
  }

  static size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
    const int64_t k_size = padded_to_pieces(p.head_dim), v_size = padded_to_pieces(p.head_dim_v);
    return row_state_bytes(p, num_rows, v_size) +
           (v_size + kStepKeys * (k_size + v_size)) * sizeof(BFloat16);
  }

  // The partial state of the rows over their keys in `range`: see Kernels::attend. False if a NaN
  // may come from an infinite value, with a weight whose second term is 0 or less.
  bool run(KeyRange range, float* o, float* lse) {
    load_queries();
    this->walk_in_order(range, [this](auto&&... arguments) { attend_step(arguments...); });
    state_.template normalise<BFloat16>(o, lse);
    if (!weights_need_two_terms(p_)) return true;
    for (int64_t row = 0; row < rows_.count; ++row) {
      const bool values_alone = lse[row] == lse[row];  // and no score is a NaN
      if (values_alone && has_nan(o + row * p_.head_dim_v, p_.head_dim_v)) return false;
    }
    return true;
  }

 private:
  using RowsAttention<T>::p_, RowsAttention<T>::rows_, RowsAttention<T>::state_;

  // As they are, in rows that are padded with zeros.
  void load_queries() {
    auto* q = reinterpret_cast<BFloat16*>(state_.q);
    const int64_t stride = padded_to_pieces(p_.head_dim);
    for (int64_t row = 0; row < rows_.count; ++row, q += stride) {
      __builtin_memset(q, 0, stride * sizeof(BFloat16));
      __builtin_memcpy(q, query_of_row<BFloat16>(p_, rows_, row), p_.head_dim * sizeof(BFloat16));
    }
  }

  // Adds the keys of `step`, which begins at `key`, to rows [row_begin, row_end), all of which see
  // all of them. For more than a block of rows elements of 8 bits are converted only once.
  void attend_step(int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step,
                   const LinesAhead<T>*) {
    if (kIsScaled<T> && row_end - row_begin > kRowBlock) {
      const BFloat16 *k[kStepKeys], *v[kStepKeys];
      convert(step.k, step.count, p_.head_dim, k_copies_, k);
      convert(step.v, step.count, p_.head_dim_v, v_copies_, v);
      attend_rows(row_begin, row_end, key, step, k, v);
    } else {
      attend_rows(row_begin, row_end, key, step, step.k, step.v);
    }
  }

  template <typename Element>
  void attend_rows(int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step,
                   const Element* const* k, const Element* const* v) {
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      const auto* q = reinterpret_cast<const BFloat16*>(state_.q);
      score_matrices<kRows>(k, step.count, q + row * padded_to_pieces(p_.head_dim), p_.head_dim,
                            state_.scores + row * kStepKeys);
    });
    float rescale[kMaxRows];
    this->weigh_rows(row_begin, row_end, key, step, score_scale(p_), rescale);
    // Keys past the end have the weight 0; their values may be infinite.
    const Element* padded_v[kStepKeys];
    if (step.count < kStepKeys) {
      for (int i = 0; i < kStepKeys; ++i) {
        padded_v[i] = i < step.count ? v[i] : reinterpret_cast<const Element*>(zeros_);
      }
      v = padded_v;
    }
    const int num_quads = (step.count + kQuadKeys - 1) / kQuadKeys;
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      uint16x8_t terms[kQuads * 2 * ((kRows + 1) / 2)];
      split_weights<kRows>(state_.scores + row * kStepKeys, terms);
      float* acc = state_.acc + row * state_.stride;
      if (weights_need_two_terms(p_)) {
        sum_matrices<kRows, 2>(v, num_quads, terms, rescale + row, p_.head_dim_v, acc);
      } else {
        sum_matrices<kRows, 1>(v, num_quads, terms, rescale + row, p_.head_dim_v, acc);
      }
    });
  }

  // `count` rows as bfloat16 in `copies`, found by `rows` [kStepKeys], whose last one is repeated.
  static void convert(const T* const* source, int count, int64_t head_dim, BFloat16* copies,
                      const BFloat16** rows) {
    const PieceLoader<T> loader;
    const int64_t stride = padded_to_pieces(head_dim);
    for (int i = 0; i < count; ++i, copies += stride) {
      rows[i] = copies;
      for_pieces(head_dim, loader, [&](int64_t d, const auto& loads) {
        uint16x8_t x[2];
        loads.load(source[i] + d, x);
        vst1q_u16(&copies[d].bits, x[0]);
        vst1q_u16(&copies[d + 8].bits, x[1]);
      });
    }
    for (int i = count; i < kStepKeys; ++i) rows[i] = rows[count - 1];
  }

  BFloat16* const zeros_;                       // [padded_to_pieces(head_dim_v)]
  BFloat16 *const k_copies_, *const v_copies_;  // of a step's keys and values of 8 bits
};

}  // namespace
}  // namespace tree_attention::cpu
