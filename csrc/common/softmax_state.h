// SPDX-License-Identifier: BSD-3-Clause
//
// The one algebra of the library. A partial state of a query row over a set of keys is (o, lse):
// lse = log sum exp(score) (natural logarithm), o = sum exp(score - lse) v. The empty set is
// (0, -inf). States merge associatively, so tiles, threads, CTAs and ranks share this text.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace tree_attention {

// How the states of a row combine: decided once per row, then applied to each of its head_dim
// values.
struct Merge {
  enum class Take { kBoth, kA, kB, kNone };
  Take take;
  float weight_a, weight_b;  // sum to one when both are taken
  float lse;

  // An empty side is left out by selection: its `o` may be uninitialised, and 0 * NaN is NaN.
  // The explicit fmaf in fixed operand order keeps contraction from changing bits.
  TREE_ATTENTION_HOST_DEVICE float operator()(float o_a, float o_b) const {
    const float both = fmaf(weight_b, o_b, weight_a * o_a);
    const float one = take == Take::kA ? o_a : take == Take::kB ? o_b : 0.0f;
    return take == Take::kBoth ? both : one;
  }
};

// `a` is the lower part (earlier keys, lower rank). NaN propagates; +inf is a producer's fault and
// gives NaN.
TREE_ATTENTION_HOST_DEVICE Merge merge(float lse_a, float lse_b) {
  const bool empty_a = lse_a == -INFINITY, empty_b = lse_b == -INFINITY;
  if (empty_a && empty_b) return {Merge::Take::kNone, 0.0f, 0.0f, -INFINITY};
  if (empty_a) return {Merge::Take::kB, 0.0f, 1.0f, lse_b};
  if (empty_b) return {Merge::Take::kA, 1.0f, 0.0f, lse_a};
  const bool a_larger = lse_a >= lse_b;
  const float larger = a_larger ? lse_a : lse_b;
  if (!(fabsf(lse_a) < INFINITY && fabsf(lse_b) < INFINITY)) {
    return {Merge::Take::kBoth, NAN, NAN, NAN};
  }
  const float t = expf(-fabsf(lse_b - lse_a));
  const float r = 1.0f / (1.0f + t);
  return {Merge::Take::kBoth, a_larger ? r : t * r, a_larger ? t * r : r, larger + log1pf(t)};
}

// The canonical order: n parts are split at the largest power of two below n, left merged with
// right. Read as a binary counter it needs one look at each part and a stack of log2 n states:
// aligned groups of 2^k parts are its subtrees, so a butterfly and a hierarchical exchange give the
// same bits as a flat merge.
// load(i, slot) puts part i into a stack slot; merge_slots(a, b) merges slot b (upper) into slot a.
// The result is in slot 0; slots stay below kMaxMergeSlots.
constexpr int kMaxMergeSlots = 64;

template <typename Load, typename MergeSlots>
TREE_ATTENTION_HOST_DEVICE void merge_in_canonical_order(int64_t num_parts, Load load,
                                                         MergeSlots merge_slots) {
  int top = 0;
  for (int64_t i = 0; i < num_parts; ++i) {
    load(i, top++);
    for (int64_t count = i + 1; count % 2 == 0; count /= 2, --top) merge_slots(top - 2, top - 1);
  }
  for (; top > 1; --top) merge_slots(top - 2, top - 1);
}

// The same order for parts that are merged where they lie: merge_pair(i, j) replaces part i by the
// merge of parts i (lower) and j; part 0 ends as the result.
template <typename MergePair>
TREE_ATTENTION_HOST_DEVICE void merge_in_canonical_order(int64_t num_parts, MergePair merge_pair) {
  int64_t part_of_slot[kMaxMergeSlots];
  merge_in_canonical_order(
      num_parts, [&](int64_t i, int slot) { part_of_slot[slot] = i; },
      [&](int a, int b) { merge_pair(part_of_slot[a], part_of_slot[b]); });
}

}  // namespace tree_attention
