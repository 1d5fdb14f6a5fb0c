// SPDX-License-Identifier: BSD-3-Clause
//
// The products of products.h in the order of memory, a whole row at a time: there are prefetchers
// that follow nothing else. The lines far ahead are fetched meanwhile.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "common/rows.h"
#include "cpu/vector/attention.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/products.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

// Calls body(d, load) for pairs of vectors of a row; the last one loads what is left of it.
template <typename T, typename Body>
__attribute__((always_inline)) inline void for_pairs(int64_t head_dim, const Body& body) {
  int64_t d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
    body(d, [](const T* p, Vec& a, Vec& b) { load_pair(p, a, b); });
  }
  if (d == head_dim) return;
  const int rest = static_cast<int>(head_dim - d);
  body(d, [rest](const T* p, Vec& a, Vec& b) { load_pair(p, rest, a, b); });
}

// Where a row is many vectors, several keys meet the queries, and all queries the values, at a
// time: registers save more loads then than the order of memory would.
constexpr int kKeysTogether = kShortVectors ? kKeyBlock : 1;

// scores [kRows, kStepKeys] = q [kRows, padded(head_dim)] times the keys of a step.
template <int kRows, typename T>
inline void score_in_order(const Step<T>& step, const LinesAhead<T>* ahead, const float* q,
                           int64_t head_dim, float* scores) {
  const int64_t q_stride = padded(head_dim);
  for (int first = 0; first < step.count; first += kKeyBlock) {
    Vec sums[kRows][kKeyBlock];
#pragma GCC unroll 4
    for (int key = 0; key < kKeyBlock; key += kKeysTogether) {
      Vec of_keys[kRows][kKeysTogether];
      for (int i = 0; i < kKeysTogether; ++i) {
        if (ahead != nullptr) ahead->fetch_key(first + key + i);
        for (int row = 0; row < kRows; ++row) of_keys[row][i] = zero();
      }
      for_pairs<T>(head_dim, [&](int64_t d, const auto& load_key) __attribute__((always_inline)) {
        Vec k_even[kKeysTogether], k_odd[kKeysTogether];
        for (int i = 0; i < kKeysTogether; ++i) {
          load_key(step.k[first + key + i] + d, k_even[i], k_odd[i]);
        }
        for (int row = 0; row < kRows; ++row) {
          const float* of_row = q + row * q_stride + d;
          const Vec q_even = load(of_row), q_odd = load(of_row + kLanes);
          for (int i = 0; i < kKeysTogether; ++i) {
            of_keys[row][i] = fma(q_even, k_even[i], of_keys[row][i]);
            of_keys[row][i] = fma(q_odd, k_odd[i], of_keys[row][i]);
          }
        }
      });
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kKeysTogether; ++i) sums[row][key + i] = of_keys[row][i];
      }
    }
    store_sums<kRows>(sums, scores + first, kStepKeys);
  }
}

// The same as a function of its own, or gcc keeps sums of NEON in memory as well.
template <int kRows, typename T>
__attribute__((noinline)) void score_alone(const Step<T>& step, const LinesAhead<T>* ahead,
                                           const float* q, int64_t head_dim, float* scores) {
  score_in_order<kRows>(step, ahead, q, head_dim, scores);
}

// acc [kRows, padded(head_dim)] = rescale [kRows] * acc + weights [kRows, kStepKeys] times the
// values of a step, kPairs pairs of vectors at a time.
template <int kRows, int kPairs, typename T>
inline void sum_in_order(const Step<T>& step, const LinesAhead<T>* ahead, const float* weights,
                         const float* rescale, int64_t head_dim, float* acc) {
  static_assert(kRows * kPairs <= 8);  // 16 sums
  const int64_t stride = padded(head_dim);
  for (int64_t d = 0; d < head_dim; d += kPairs * kPair) {
    Vec sums[kRows][2 * kPairs];
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < 2 * kPairs; ++i) sums[row][i] = zero();
    }
    for (int key = 0; key < step.count; ++key) {
      if (ahead != nullptr && d == 0) ahead->fetch_value(key);
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) {
        const T* of_key = step.v[key] + d + pair * kPair;
        Vec even, odd;
        if (const int64_t left = head_dim - d; kPairs == 1 && left < kPair) {
          load_pair(of_key, static_cast<int>(left), even, odd);
        } else {
          load_pair(of_key, even, odd);
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const Vec weight = broadcast(weights[row * kStepKeys + key]);
          sums[row][2 * pair] = fma(weight, even, sums[row][2 * pair]);
          sums[row][2 * pair + 1] = fma(weight, odd, sums[row][2 * pair + 1]);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec factor = broadcast(rescale[row]);
      float* out = acc + row * stride + d;
      for (int i = 0; i < 2 * kPairs; ++i) {
        store(out + i * kLanes, fma(load(out + i * kLanes), factor, sums[row][i]));
      }
    }
  }
}

// VectorAttention in the order of memory.
template <typename T>
class InOrderAttention : RowsAttention<T> {
 public:
  InOrderAttention(const DecodeParams& p, const Rows& rows, void* workspace)
      : RowsAttention<T>(p, rows, workspace, padded(p.head_dim_v)) {}

  // The partial state of the rows over their keys in `range`: see Kernels::attend.
  void run(KeyRange range, float* o, float* lse) {
    state_.template load_queries<T>();
    this->walk_in_order(range, [this](auto&&... arguments) { attend_step(arguments...); });
    state_.template normalise<T>(o, lse);
  }

 private:
  using RowsAttention<T>::p_, RowsAttention<T>::state_;

  void attend_step(int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step,
                   const LinesAhead<T>* ahead) {
    const auto ahead_of = [&](int64_t row) { return row == row_begin ? ahead : nullptr; };
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      const float* q = state_.q + row * padded(p_.head_dim);
      float* scores = state_.scores + row * kStepKeys;
      if constexpr (kShortVectors) {
        score_alone<kRows>(step, ahead_of(row), q, p_.head_dim, scores);
      } else {
        score_in_order<kRows>(step, ahead_of(row), q, p_.head_dim, scores);
      }
    });
    float rescale[kMaxRows];
    this->weigh_rows(row_begin, row_end, key, step, 1.0f, rescale);
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      const auto sum = [&]<int kSummed, int kPairs>(int64_t first, const LinesAhead<T>* lines) {
        sum_in_order<kSummed, kPairs>(step, lines, state_.scores + first * kStepKeys,
                                      rescale + first, p_.head_dim_v,
                                      state_.acc + first * padded(p_.head_dim_v));
      };
      if (p_.head_dim_v % (2 * kPair) != 0) {
        sum.template operator()<kRows, 1>(row, ahead_of(row));
      } else if (kShortVectors || p_.head_dim_v % (4 * kPair) != 0) {
        sum.template operator()<kRows, 2>(row, ahead_of(row));
      } else {
        constexpr int kFirst = kRows < 2 ? kRows : 2;
        sum.template operator()<kFirst, 4>(row, ahead_of(row));
        if constexpr (kRows > 2) sum.template operator()<kRows - 2, 4>(row + 2, nullptr);
      }
    });
  }
};

}  // namespace
}  // namespace tree_attention::cpu
