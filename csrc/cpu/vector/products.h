// SPDX-License-Identifier: BSD-3-Clause
//
// The two products of a step, scores = q K^T and acc += P V, with what they fetch meanwhile. Lanes
// run over head_dim.
#pragma once

#include <cstdint>

#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

// What a block of rows fetches while it computes is a function of the key and the column where its
// loop is. This one fetches nothing.
inline auto fetch_nothing() {
  return [](int, int64_t) {};
}

// Fetches the rows ahead, at the same column.
template <typename T>
inline auto fetch_columns(const T* const* ahead) {
  return [ahead](int key, int64_t d) {
    const auto* const column = reinterpret_cast<const char*>(ahead[key] + d);
    constexpr int kBytes = kPair * sizeof(T);
    for (int i = 0; i < kBytes; i += kLineBytes) __builtin_prefetch(column + i);
  };
}

// Fetches as many lines of the window as the loop reads of its own rows, which lie in the
// second-level cache since the window was theirs. This pays where keys come from memory.
template <typename T>
inline auto fetch_window(Window<T>& window) {
  return [&window, calls = 0u](int, int64_t) mutable {
    constexpr int kPairBytes = kPair * sizeof(T);
    constexpr int kCalls = Window<T>::kPlaces * kLineBytes / kPairBytes;
    if (++calls % kCalls == 0) window.fetch();
  };
}

// scores [kRows, kKeyBlock] = q [kRows, head_dim] times the transpose of k [kKeyBlock, head_dim].
// Rows of scores are kStepKeys apart, rows of q padded(head_dim); k holds the addresses of its
// rows.
template <int kRows, typename T, typename Fetch>
inline void score_block(const T* const* k, Fetch&& fetch, const float* q, int64_t head_dim,
                        float* scores) {
  const int64_t q_stride = padded(head_dim);
  Vec sums[kRows][kKeyBlock];
  for (int row = 0; row < kRows; ++row) {
    for (int key = 0; key < kKeyBlock; ++key) sums[row][key] = zero();
  }
  const auto accumulate = [&](int64_t d, const auto& load_keys) {
    Vec even[kKeyBlock], odd[kKeyBlock];
    for (int key = 0; key < kKeyBlock; ++key) {
      fetch(key, d);
      load_keys(k[key] + d, even[key], odd[key]);
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec q_even = load(q + row * q_stride + d),
                q_odd = load(q + row * q_stride + d + kLanes);
      for (int key = 0; key < kKeyBlock; ++key) {
        sums[row][key] = fma(q_even, even[key], sums[row][key]);
        sums[row][key] = fma(q_odd, odd[key], sums[row][key]);
      }
    }
  };
  int64_t d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
    accumulate(d, [](const T* p, Vec& a, Vec& b) { load_pair(p, a, b); });
  }
  if (d < head_dim) {
    const int rest = static_cast<int>(head_dim - d);
    accumulate(d, [rest](const T* p, Vec& a, Vec& b) { load_pair(p, rest, a, b); });
  }
  store_sums<kRows>(sums, scores, kStepKeys);
}

// acc [kRows, head_dim] = rescale [kRows] * acc + weights [kRows, step.count] times v [step.count,
// head_dim]. Rows of acc are padded(head_dim) apart, rows of weights kStepKeys.
template <int kRows, typename T, typename Fetch>
inline void value_block(const Step<T>& step, Fetch&& fetch, const float* weights,
                        const float* rescale, int64_t head_dim, float* acc) {
  const int64_t stride = padded(head_dim);
  const auto accumulate = [&](int64_t d, const auto& load_values) {
    Vec even[kRows], odd[kRows];
    for (int row = 0; row < kRows; ++row) even[row] = odd[row] = zero();
    for (int key = 0; key < step.count; ++key) {
      fetch(key, d);
      Vec v_even, v_odd;
      load_values(step.v[key] + d, v_even, v_odd);
      for (int row = 0; row < kRows; ++row) {
        const Vec weight = broadcast(weights[row * kStepKeys + key]);
        even[row] = fma(weight, v_even, even[row]);
        odd[row] = fma(weight, v_odd, odd[row]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec factor = broadcast(rescale[row]);
      float* sums = acc + row * stride + d;
      store(sums, fma(load(sums), factor, even[row]));
      store(sums + kLanes, fma(load(sums + kLanes), factor, odd[row]));
    }
  };
  int64_t d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
    accumulate(d, [](const T* p, Vec& a, Vec& b) { load_pair(p, a, b); });
  }
  if (d < head_dim) {
    const int rest = static_cast<int>(head_dim - d);
    accumulate(d, [rest](const T* p, Vec& a, Vec& b) { load_pair(p, rest, a, b); });
  }
}

// Calls body<n>(first row) for consecutive blocks of n rows: kRowBlock, or fewer in the last block.
template <typename Body>
inline void for_row_blocks(int64_t begin, int64_t end, const Body& body) {
  static_assert(kRowBlock == 4);
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) body.template operator()<4>(row);
  switch (end - row) {
    case 3:
      body.template operator()<3>(row);
      break;
    case 2:
      body.template operator()<2>(row);
      break;
    case 1:
      body.template operator()<1>(row);
      break;
    default:
      break;
  }
}

}  // namespace
}  // namespace tree_attention::cpu
