// SPDX-License-Identifier: BSD-3-Clause
//
// Products in float32, of keys that are widened once for all heads. Lanes run over head_dim in the
// products, and over keys in the sum over heads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "cpu/index/scores.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/products.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

constexpr int kTileColumns = ScoreTile::kKeys;
static_assert(kTileColumns % kLanes == 0 && kTileColumns % kKeyBlock == 0);

// products [kRows, kKeyBlock] of widened rows, kTileColumns apart.
template <int kRows>
inline void multiply_block(const float* q, const float* keys, int64_t stride, float* products) {
  Vec sums[kRows][kKeyBlock];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = zero();
  }
  for (int64_t d = 0; d < stride; d += kLanes) {
    Vec k[kKeyBlock];
    for (int key = 0; key < kKeyBlock; ++key) k[key] = load(keys + key * stride + d);
    for (int row = 0; row < kRows; ++row) {
      const Vec x = load(q + row * stride + d);
      for (int key = 0; key < kKeyBlock; ++key) sums[row][key] = fma(x, k[key], sums[row][key]);
    }
  }
  store_sums<kRows>(sums, products, kTileColumns);
}

// scores [kTileColumns] of products [num_heads, kTileColumns].
inline void sum_heads(const IndexHeads& heads, int count, const float* products, float* scores) {
  const Vec scale = broadcast(heads.scale);
  for (int key = 0; key < count; key += kLanes) {
    Vec sum = zero();
    for (int64_t head = 0; head < heads.num_heads; ++head) {
      const Vec x = mul(scale, load(products + head * kTileColumns + key));
      sum = fma(broadcast(heads.weights[head]), max_keep_nan(zero(), x), sum);
    }
    store(scores + key, sum);
  }
}

inline void scale_products(const IndexHeads& heads, int count, const float* products,
                           float* scores) {
  const Vec scale = broadcast(heads.scale);
  for (int64_t head = 0; head < heads.num_heads; ++head) {
    for (int key = 0; key < count; key += kLanes) {
      const int64_t place = head * kTileColumns + key;
      store(scores + place, mul(scale, load(products + place)));
    }
  }
}

inline void finish_scores(const IndexHeads& heads, int count, const float* products,
                          float* scores) {
  heads.weights == nullptr ? scale_products(heads, count, products, scores)
                           : sum_heads(heads, count, products, scores);
}

struct VectorScores {
  static size_t query_bytes(const IndexHeads& heads) {
    return heads.num_heads * padded(heads.head_dim) * sizeof(float);
  }
  static size_t scratch_bytes(const IndexHeads& heads) {
    return (kKeyBlock * padded(heads.head_dim) + heads.num_heads * kTileColumns) * sizeof(float);
  }

  static void prepare(const IndexHeads& heads, void* query) {
    with_dtype(heads.dtype, [&]<typename T>() {
      for (int64_t head = 0; head < heads.num_heads; ++head) {
        widen_row(static_cast<const T*>(heads.q) + head * heads.q_stride, heads.head_dim,
                  static_cast<float*>(query) + head * padded(heads.head_dim));
      }
    });
  }

  static void score(const IndexHeads& heads, const void* query, const ScoreTile& tile,
                    void* scratch, float* scores) {
    const int64_t stride = padded(heads.head_dim);
    const auto* const q = static_cast<const float*>(query);
    float* const keys = static_cast<float*>(scratch);
    float* const products = keys + kKeyBlock * stride;
    with_dtype(heads.dtype, [&]<typename T>() {
      for (int key = 0; key < tile.count; key += kKeyBlock) {
        for (int i = 0; i < kKeyBlock; ++i) {
          widen_row(static_cast<const T*>(tile.keys[key + i]), heads.head_dim, keys + i * stride);
        }
        for_row_blocks(0, heads.num_heads, [&]<int kRows>(int64_t head) {
          multiply_block<kRows>(q + head * stride, keys, stride,
                                products + head * kTileColumns + key);
        });
      }
    });
    finish_scores(heads, tile.count, products, scores);
  }
};

constexpr ScoreKernels kVectorScores = {VectorScores::query_bytes, VectorScores::scratch_bytes,
                                        VectorScores::prepare, VectorScores::score};

}  // namespace
}  // namespace tree_attention::cpu
