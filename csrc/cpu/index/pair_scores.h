// SPDX-License-Identifier: BSD-3-Clause
//
// Products of pairs of bfloat16, of keys where they lie. Few heads are multiplied with lanes over
// head_dim, more heads with lanes over heads: then no sum runs over lanes but the last one, and a
// key is read in pairs that are the same for all lanes.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "cpu/bf16/elements.h"
#include "cpu/bf16/key_dots.h"
#include "cpu/bf16/pairs.h"
#include "cpu/index/scores.h"
#include "cpu/index/vector_scores.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

// With up to so many heads, lanes over head_dim take less time: half as much with four heads.
constexpr int64_t kFewHeads = 8;
// Keys that meet one or two vectors of heads at a time: their sums wait for six cycles each.
constexpr int kKeysOfHeads = 8;

// Words of pairs, of which the last one of an odd head_dim has one element.
inline int64_t pairs_of(int64_t head_dim) { return (head_dim + 1) / 2; }

// sums [kVecs, kKeysOfHeads], lanes over heads: q [kVecs, pairs, kLanes] times keys. fetch(i) is
// called for each of the keys.
template <int kVecs, typename Fetch>
inline void multiply_heads(const uint32_t* q, int64_t head_dim, const BFloat16* const* keys,
                           Vec (&sums)[kVecs][kKeysOfHeads], const Fetch& fetch) {
  const int64_t pairs = pairs_of(head_dim);
  for (auto& vec : sums) {
    for (Vec& sum : vec) sum = zero();
  }
  const auto accumulate = [&](int64_t pair, const auto& load_word) {
    __m512i x[kVecs];
    for (int vec = 0; vec < kVecs; ++vec) {
      x[vec] = _mm512_loadu_si512(q + (vec * pairs + pair) * kLanes);
    }
    for (int key = 0; key < kKeysOfHeads; ++key) {
      __m512i word;
      load_word(keys[key] + 2 * pair, word);
      for (int vec = 0; vec < kVecs; ++vec) sums[vec][key] = dot(x[vec], word, sums[vec][key]);
    }
  };
  const int64_t whole_pairs = head_dim / 2;
  int64_t pair = 0;
  for (int key = 0; key < kKeysOfHeads; ++key) {
    fetch(key);
    for (const int64_t end = whole_pairs * (key + 1) / kKeysOfHeads; pair < end; ++pair) {
      accumulate(pair, [](const BFloat16* p, __m512i& x) { x = broadcast_pair(p); });
    }
  }
  if (head_dim % 2 == 1) {
    accumulate(pairs - 1, [](const BFloat16* p, __m512i& x) { x = _mm512_set1_epi32(p->bits); });
  }
}

struct PairScores {
  static bool supports(const IndexHeads& heads) { return heads.dtype == DataType::kBFloat16; }
  static bool has_few_heads(const IndexHeads& heads) { return heads.num_all_heads <= kFewHeads; }
  static int64_t vecs(const IndexHeads& heads) { return (heads.num_heads + kLanes - 1) / kLanes; }
  static size_t query_bytes(const IndexHeads& heads) {
    if (!supports(heads)) return VectorScores::query_bytes(heads);
    if (has_few_heads(heads)) {
      return heads.num_heads * dot_stride(heads.head_dim) * sizeof(BFloat16);
    }
    // and the weights, padded with zeros
    return vecs(heads) * (pairs_of(heads.head_dim) + 1) * kLanes * sizeof(uint32_t);
  }
  static size_t scratch_bytes(const IndexHeads& heads) {
    if (!supports(heads)) return VectorScores::scratch_bytes(heads);
    return (has_few_heads(heads) ? heads.num_heads : 2 * kLanes) * kTileColumns * sizeof(float);
  }

  static void prepare(const IndexHeads& heads, void* query) {
    if (!supports(heads)) return VectorScores::prepare(heads, query);
    __builtin_memset(query, 0, query_bytes(heads));
    const auto* const from = static_cast<const BFloat16*>(heads.q);
    auto* const to = static_cast<BFloat16*>(query);
    const int64_t pairs = pairs_of(heads.head_dim);
    auto* const weights = reinterpret_cast<float*>(to) + vecs(heads) * pairs * kLanes;
    for (int64_t head = 0; head < heads.num_heads; ++head) {
      const BFloat16* const row = from + head * heads.q_stride;
      if (has_few_heads(heads)) {
        __builtin_memcpy(to + head * dot_stride(heads.head_dim), row,
                         heads.head_dim * sizeof(BFloat16));
        continue;
      }
      BFloat16* const lane = to + 2 * (head / kLanes * pairs * kLanes + head % kLanes);
      for (int64_t d = 0; d < heads.head_dim; ++d) lane[d / 2 * 2 * kLanes + d % 2] = row[d];
      if (heads.weights != nullptr) weights[head] = heads.weights[head];
    }
  }

  static void score(const IndexHeads& heads, const void* query, const ScoreTile& tile,
                    void* scratch, float* scores) {
    if (!supports(heads)) return VectorScores::score(heads, query, tile, scratch, scores);
    if (has_few_heads(heads)) return score_few_heads(heads, query, tile, scratch, scores);
    const auto* const q = static_cast<const uint32_t*>(query);
    auto* const sums = static_cast<float*>(scratch);
    const int64_t num_vecs = vecs(heads);
    for (int64_t vec = 0; vec < num_vecs; vec += 2) {
      num_vecs - vec == 1 ? score_heads<1>(heads, q, vec, tile, sums, scores)
                          : score_heads<2>(heads, q, vec, tile, sums, scores);
    }
    if (heads.weights == nullptr) return;
    for (int key = 0; key < tile.count; key += kKeyBlock) {
      Vec block[1][kKeyBlock];
      for (int i = 0; i < kKeyBlock; ++i) block[0][i] = load(sums + (key + i) * kLanes);
      store_sums<1>(block, scores + key, kTileColumns);
    }
  }

 private:
  // keys = the keys of the tile from `first` on.
  template <int kCount>
  static void take_keys(const ScoreTile& tile, int first, const BFloat16* (&keys)[kCount]) {
    for (int i = 0; i < kCount; ++i) keys[i] = static_cast<const BFloat16*>(tile.keys[first + i]);
  }

  // Nothing is fetched: keys are read in the order of memory, which caches follow by themselves.
  static void score_few_heads(const IndexHeads& heads, const void* query, const ScoreTile& tile,
                              void* scratch, float* scores) {
    constexpr const LinesAhead<BFloat16>* kNothing = nullptr;
    const auto* const q = static_cast<const BFloat16*>(query);
    auto* const products = static_cast<float*>(scratch);
    for (int first = 0; first < tile.count; first += kStepKeys) {
      const int count = tile.count - first < kStepKeys ? tile.count - first : kStepKeys;
      const BFloat16* keys[kStepKeys];
      take_keys(tile, first, keys);
      for_row_blocks(0, heads.num_heads, [&]<int kRows>(int64_t head) {
        score_dots<kRows, false>(keys, count, q + head * dot_stride(heads.head_dim), heads.head_dim,
                                 products + head * kTileColumns + first, kTileColumns, kNothing);
      });
    }
    finish_scores(heads, tile.count, products, scores);
  }

  // Line after line: products read pairs of several keys in turn, which caches do not follow.
  __attribute__((always_inline)) static void fetch_key(const void* key, int64_t head_dim) {
    for (int64_t byte = 0; byte < 2 * head_dim; byte += kLineBytes) {
      __builtin_prefetch(static_cast<const char*>(key) + byte);
    }
  }

  // Vectors [vec, vec + kVecs) of heads: adds what they weigh to sums [keys, kLanes], or stores
  // scores.
  template <int kVecs>
  static void score_heads(const IndexHeads& heads, const uint32_t* q, int64_t vec,
                          const ScoreTile& tile, float* sums, float* scores) {
    const int64_t pairs = pairs_of(heads.head_dim);
    const Vec scale = broadcast(heads.scale);
    const auto* const weights = reinterpret_cast<const float*>(q + vecs(heads) * pairs * kLanes);
    for (int first = 0; first < tile.count; first += kKeysOfHeads) {
      const BFloat16* keys[kKeysOfHeads];
      take_keys(tile, first, keys);
      const void* const* const ahead = tile.keys + first + ScoreTile::kAhead;
      Vec products[kVecs][kKeysOfHeads];
      multiply_heads<kVecs>(q + vec * pairs * kLanes, heads.head_dim, keys, products, [&](int i) {
        if (vec == 0) fetch_key(ahead[i], heads.head_dim);
      });
      for (int i = 0; i < kKeysOfHeads; ++i) {
        float* const place = sums + (first + i) * kLanes;
        if (heads.weights == nullptr) {
          for (int v = 0; v < kVecs; ++v) {
            store(place + v * kTileColumns * kLanes, mul(scale, products[v][i]));
          }
          continue;
        }
        Vec sum = vec == 0 ? zero() : load(place);
        for (int v = 0; v < kVecs; ++v) {
          // An infinite key makes NaN of the zeros after the last head.
          const auto exists = first_lanes(static_cast<int>(heads.num_heads - (vec + v) * kLanes));
          const Vec x = _mm512_maskz_mul_ps(exists, scale, products[v][i]);
          sum = fma(load(weights + (vec + v) * kLanes), max_keep_nan(zero(), x), sum);
        }
        store(place, sum);
      }
    }
    if (heads.weights != nullptr) return;
    for (int v = 0; v < kVecs; ++v) {
      const int64_t head = (vec + v) * kLanes;
      const float* const of_keys = sums + v * kTileColumns * kLanes;
      for (int first = 0; first < tile.count; first += kLanes) {
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          block[i] = _mm512_loadu_si512(of_keys + (first + i) * kLanes);
        }
        transpose(block);
        for (int i = 0; i < kLanes && head + i < heads.num_heads; ++i) {
          _mm512_storeu_si512(scores + (head + i) * kTileColumns + first, block[i]);
        }
      }
    }
  }
};

constexpr ScoreKernels kPairScores = {PairScores::query_bytes, PairScores::scratch_bytes,
                                      PairScores::prepare, PairScores::score};

}  // namespace
}  // namespace tree_attention::cpu
