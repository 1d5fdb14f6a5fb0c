// SPDX-License-Identifier: BSD-3-Clause
//
// The softmax of one row, step by step, and what scores are made of. Scores are in base 2.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/decode_params.h"
#include "common/rows.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/simd_math.h"

namespace tree_attention::cpu {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// The natural logsumexp of a row whose weights, relative to `base`, have this sum. In double: the
// base may be far from the largest score, and the two terms cancel then.
inline float lse_of(float base, double sum) {
  constexpr double kLn2 = 0.693147180559945309417;
  return sum == 0.0 ? -INFINITY : static_cast<float>(base * kLn2 + __builtin_log(sum));
}

// What queries are multiplied by before their product with keys: the rest of the way to a score in
// base 2 follows in adjust_scores.
inline float score_scale(const DecodeParams& p) {
  return p.softcap == 0.0f ? p.softmax_scale * kLog2E : p.softmax_scale / p.softcap;
}

// positions [kStepKeys]: the global positions of the keys from key_begin on.
inline void locate_positions(const KeyLayout& layout, int64_t key_begin, int64_t* positions) {
  int64_t offset = key_begin % layout.block;
  int64_t position = key_position(layout, key_begin);
  for (int i = 0; i < kStepKeys; ++i) {
    positions[i] = position++;
    if (++offset == layout.block) {
      offset = 0;
      position += layout.stride - layout.block;
    }
  }
}

// scores [kStepKeys] of one row, from key_begin on: the soft-cap, then ALiBi, both in base 2.
inline void adjust_scores(const DecodeParams& p, const Rows& rows, int64_t row, int64_t key_begin,
                          float* scores) {
  if (p.softcap != 0.0f) {  // q was scaled by softmax_scale / softcap
    const Vec factor = broadcast(p.softcap * kLog2E);
    for (int i = 0; i < kStepKeys; i += kLanes) {
      store(scores + i, mul(tanh(load(scores + i)), factor));
    }
  }
  if (p.alibi_slopes != nullptr) {
    const auto [token, head] = place_of_row(p, rows, row);
    const float slope = -kLog2E * p.alibi_slopes[head];
    const int64_t position = query_position(p, rows.batch, token);
    int64_t key_positions[kStepKeys];
    locate_positions(p.key_layout, key_begin, key_positions);
    // The difference is exact in integers; positions in the millions are not, in float32.
    float distances[kStepKeys];
    for (int i = 0; i < kStepKeys; ++i) {
      distances[i] = static_cast<float>(position - key_positions[i]);
    }
    for (int i = 0; i < kStepKeys; i += kLanes) {
      store(scores + i, fma(broadcast(slope), load(distances + i), load(scores + i)));
    }
  }
}

struct Indices {
  float of[kStepKeys];
  constexpr Indices() : of() {
    for (int i = 0; i < kStepKeys; ++i) of[i] = static_cast<float>(i);
  }
};
constexpr Indices kIndices;

// How far the scores of a row may exceed its base before it follows them. Factors are rounded, and
// where scores rise a little with each step, so many errors of one sign would add up; factors of a
// half and less forget them. A row of one large score still has the weight 1.
constexpr float kRowSlack = 1;

// scores [kStepKeys] of one row become weights (online softmax); weights from `count` on are 0.
// Returns the factor by which the row's sums so far are to be multiplied.
inline float softmax_row(int count, float* scores, float& base, double& sum) {
  if (count < kStepKeys) {  // whole vectors, which those below can load without a wait
    for (int i = 0; i < kStepKeys; i += kLanes) {
      store(scores + i, select_below(load(kIndices.of + i), static_cast<float>(count),
                                     load(scores + i), broadcast(-INFINITY)));
    }
  }
  Vec step_max = load(scores);
  for (int i = kLanes; i < kStepKeys; i += kLanes) {
    step_max = max_keep_nan(step_max, load(scores + i));
  }
  const float old_base = base;
  const float largest = reduce_max(step_max);
  if (largest > base + kRowSlack) base = largest;
  const float subtracted = base == -INFINITY ? 0.0f : base;  // -inf - -inf would be NaN
  Vec step_sum = zero();
  for (int i = 0; i < kStepKeys; i += kLanes) {
    const Vec weight = exp2_nonpositive(sub(load(scores + i), broadcast(subtracted)));
    step_sum = add(step_sum, weight);
    store(scores + i, weight);
  }
  const float rescale = base == old_base ? 1.0f : __builtin_exp2f(old_base - subtracted);
  sum = sum * rescale + reduce_add(step_sum);
  return rescale;
}

}  // namespace
}  // namespace tree_attention::cpu
