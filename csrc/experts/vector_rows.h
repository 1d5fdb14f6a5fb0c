// SPDX-License-Identifier: BSD-3-Clause
//
// Products of few rows of activations with rows of weights, which are widened as they are read.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"
#include "experts/params.h"
#include "experts/rows.h"

namespace tree_attention::cpu {
namespace {

// Pairs of vectors that are read before their sums are needed again, as an addition takes several
// cycles, and rows of activations that share the weights once these are widened.
constexpr int kPairsAtOnce = 2, kRowsAtOnce = 4;
// Bytes from the weights at hand to those that are fetched: on two threads of a Zen 4, int8 weights
// [8192, 2048] take 0.8 ms with it and 1.2 ms without.
constexpr int kAhead = 4096;

template <int kRows, typename X, typename Weight>
inline void dots(const X* x, const Weight* weights, int64_t n, float* out) {
  Vec sums[kRows][2 * kPairsAtOnce];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = zero();
  }
  const auto accumulate = [&](int64_t k, int pair, const auto& load_pair_of) {
    Vec even, odd;
    load_pair_of(weights + k, even, odd);
    for (int row = 0; row < kRows; ++row) {
      Vec x_even, x_odd;
      load_pair_of(x + row * n + k, x_even, x_odd);
      sums[row][2 * pair] = fma(x_even, even, sums[row][2 * pair]);
      sums[row][2 * pair + 1] = fma(x_odd, odd, sums[row][2 * pair + 1]);
    }
  };
  int64_t k = 0;
  for (; k + kPairsAtOnce * kPair <= n; k += kPairsAtOnce * kPair) {
    for (int pair = 0; pair < kPairsAtOnce; ++pair) {
      accumulate(k + pair * kPair, pair, [](const auto* p, Vec& a, Vec& b) { load_pair(p, a, b); });
    }
  }
  for (; k < n; k += kPair) {
    const int rest = static_cast<int>(n - k < kPair ? n - k : kPair);
    accumulate(k, 0, [rest](const auto* p, Vec& a, Vec& b) { load_pair(p, rest, a, b); });
  }
  for (int row = 0; row < kRows; ++row) {
    Vec total = zero();
    for (const Vec& sum : sums[row]) total = add(total, sum);
    out[row] = reduce_add(total);
  }
}

// The numbers of a block of ExpertParams::kPacked, where the instruction set has no better way.
template <int kVecs>
inline void unpack(const uint8_t* p, Vec (&values)[kVecs]) {
  constexpr int kHalf = ExpertParams::kPacked / 2;
  Int8 numbers[2 * kHalf];
  for (int j = 0; j < kHalf; ++j) {
    numbers[j].value = static_cast<int8_t>((p[j] & 15) - 8);
    numbers[kHalf + j].value = static_cast<int8_t>((p[j] >> 4) - 8);
  }
  for (int i = 0; i < kVecs; i += 2) load_pair(numbers + i * kLanes, values[i], values[i + 1]);
}

// Weights of 4 bits: the sum over a group of inputs is multiplied with the group's scale.
template <int kRows, int kBlocks>
inline void group_dots(const float* x, const uint8_t* weights, const float* scales, int64_t n,
                       float* out) {
  constexpr int kVecs = ExpertParams::kPacked / kLanes;
  Vec totals[kRows];
  for (Vec& total : totals) total = zero();
  for (const float* const end = x + n; x < end; ++scales) {
    Vec sums[kRows][2];
    for (auto& row : sums) row[0] = row[1] = zero();
    for (int block = 0; block < kBlocks; ++block) {
      Vec values[kVecs];
      __builtin_prefetch(weights + kAhead);
      unpack(weights, values);
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kVecs; ++i) {
          sums[row][i % 2] = fma(values[i], load(x + row * n + i * kLanes), sums[row][i % 2]);
        }
      }
      weights += ExpertParams::kPacked / 2;
      x += ExpertParams::kPacked;
    }
    const Vec scale = broadcast(*scales);
    for (int row = 0; row < kRows; ++row) {
      totals[row] = fma(scale, add(sums[row][0], sums[row][1]), totals[row]);
    }
  }
  for (int row = 0; row < kRows; ++row) out[row] = reduce_add(totals[row]);
}

// For each row of weights, body(row, count, at) for `count` rows of activations, some at a time.
template <typename Body>
inline void for_rows(const WeightRows& w, const Body& body) {
  for (int64_t i = 0; i < w.count; ++i) {
    int64_t row = 0;
    for (; row + kRowsAtOnce <= w.rows; row += kRowsAtOnce) {
      body.template operator()<kRowsAtOnce>(i, row);
    }
    for (; row < w.rows; ++row) body.template operator()<1>(i, row);
  }
}

template <typename X, typename Weight>
inline void all_dots(const WeightRows& w, const X* x) {
  const Weight* const weights = static_cast<const Weight*>(w.weights);
  for_rows(w, [&]<int kRows>(int64_t i, int64_t row) {
    dots<kRows>(x + row * w.n, weights + i * w.n, w.n, w.out + i * w.rows + row);
  });
}

template <int kBlocks>
inline void all_group_dots(const WeightRows& w, const float* x) {
  const auto* const packed = static_cast<const uint8_t*>(w.weights);
  for_rows(w, [&]<int kRows>(int64_t i, int64_t row) {
    group_dots<kRows, kBlocks>(x + row * w.n, packed + i * w.n / 2,
                               w.scales + i * (w.n / w.group_size), w.n, w.out + i * w.rows + row);
  });
}

inline void multiply_weight_rows(const WeightRows& w) {
  with_dtype(w.x_dtype, [&]<typename X>() {
    const X* const x = static_cast<const X*>(w.x);
    if (w.dtype != DataType::kInt8) return all_dots<X, X>(w, x);
    float* const wide = w.workspace;
    for (int64_t row = 0; row < w.rows; ++row) {
      for (int64_t k = 0; k < w.n; k += kPair) {
        const int rest = static_cast<int>(w.n - k < kPair ? w.n - k : kPair);
        Vec pair[2];
        load_pair(x + row * w.n + k, rest, pair[0], pair[1]);
        to_memory_order(x, pair[0], pair[1]);
        alignas(64) float values[kPair];
        store(values, pair[0]);
        store(values + kLanes, pair[1]);
        __builtin_memcpy(wide + row * w.n + k, values, rest * sizeof(float));
      }
    }
    if (w.group_size == 0) return all_dots<float, Int8>(w, wide);
    w.group_size == ExpertParams::kPacked ? all_group_dots<1>(w, wide) : all_group_dots<2>(w, wide);
  });
}

}  // namespace
}  // namespace tree_attention::cpu
