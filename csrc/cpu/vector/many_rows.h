// SPDX-License-Identifier: BSD-3-Clause
//
// Many rows with float32 products, whose lanes are rows from the first product to the last, so that
// nothing is summed over lanes:
//   S^T [keys, rows] = K Q^T,   P^T = 2^(S^T - base),   O^T [dims, rows] += V^T P^T.
// Keys and values are widened to float32 once for all rows, kBlockKeys at a time. An element of
// them is broadcast from the cache, which takes no instruction of the vector unit.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/vector/far_prefetch.h"
#include "cpu/vector/key_blocks.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/many_rows_memory.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/simd_math.h"
#include "cpu/vector/softmax.h"

namespace tree_attention::cpu {
namespace {

// A row that does not see every key of a block has those masked: their scores become -inf and
// their weights 0. That is wrong only where a value is not finite, and then the output is computed
// again.
template <typename T>
class LaneRowsAttention {
  using Memory = LaneRowsMemory;

 public:
  LaneRowsAttention(const DecodeParams& p, const Rows& rows, KeyRange range, void* workspace)
      : p_(p),
        rows_(rows),
        keys_(p, rows),
        range_(range),
        m_(p, rows.count, workspace),
        num_rows_(Memory::whole_vectors(rows.count)),
        columns_(padded(p.head_dim)),
        v_columns_(padded(p.head_dim_v)),
        v_stride_(v_columns_ + Memory::kPadding) {}

  // False if o and lse are not what they should be: few rows at a time have to compute them.
  bool run(float* o, float* lse) {
    if (!locate_ranges(p_, rows_, range_, num_rows_, m_)) return false;
    load_queries();
    for (int64_t i = 0; i < num_rows_ * v_columns_; i += kLanes) {
      store(m_.acc + i, zero());
      store(m_.total + i, zero());
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      m_.base[row] = m_.total_base[row] = kNoBase;
      m_.sum[row] = 0.0;
    }
    const int64_t num_keys = range_.end - range_.begin;
    locate(0);
    for (int64_t key = 0; key < num_keys; key += Memory::kBlockKeys) {
      if (key > 0 && key % kFlushKeys == 0) flush();
      attend_keys(key, num_keys - key < Memory::kBlockKeys ? num_keys - key : Memory::kBlockKeys);
    }
    flush();
    return normalise(o, lse);
  }

 private:
  int vectors_of(int64_t block) const {
    const int64_t left = (num_rows_ - block) / kLanes;
    return left < Memory::kBlockVectors ? static_cast<int>(left) : Memory::kBlockVectors;
  }
  // The floats from one column to the next, for the vector of rows that begins at `row`.
  int64_t width_of(int64_t row) const { return vectors_of(block_of(row)) * kLanes; }
  static int64_t block_of(int64_t row) { return row / Memory::kBlockRows * Memory::kBlockRows; }
  static float* column_of(float* array, int64_t row, int64_t columns) {
    return array + block_of(row) * columns + row % Memory::kBlockRows;
  }

  void load_queries() {
    float* of_row = m_.k;  // not yet of keys
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t width = width_of(row);
      // The last row fills the last vector: a score that is not finite is then one of a row.
      if (row < rows_.count) load_query<T>(p_, rows_, row, of_row);
      float* out = column_of(m_.q, row, columns_);
      for (int64_t d = 0; d < columns_; ++d, out += width) *out = of_row[d];
    }
  }

  // Keys and values of a step in float32; those past its end are the last one.
  void widen(const Step<T>& step, int first) {
    for (int i = 0; i < kStepKeys; ++i) {
      widen_row(step.k[i], p_.head_dim, m_.k + (first + i) * columns_);
      widen_row(step.v[i], p_.head_dim_v, m_.v + (first + i) * v_stride_);
    }
    if constexpr (kIsScaled<T>) {
      __builtin_memcpy(m_.k_scale + first, step.k_scale, sizeof(step.k_scale));
      __builtin_memcpy(m_.v_scale + first, step.v_scale, sizeof(step.v_scale));
    }
  }

  static int place_of(int64_t key) { return static_cast<int>(key / Memory::kBlockKeys % 2); }

  // Finds the addresses of the block of keys from `key` on.
  void locate(int64_t key) {
    int& count = num_steps_[place_of(key)] = 0;
    for (int64_t begin = range_.begin + key; begin < range_.end && count < Memory::kBlockSteps;
         begin += kStepKeys) {
      keys_.locate(begin, end_of_step(begin, range_.end), steps_[place_of(key)][count++]);
    }
  }

  void attend_keys(int64_t key, int64_t count) {
    const int place = place_of(key), next = 1 - place;
    locate(key + Memory::kBlockKeys);
    for (int i = 0; i < num_steps_[place]; ++i) widen(steps_[place][i], i * kStepKeys);
    FarPrefetch<T> far(p_.head_dim, p_.head_dim_v);
    far.begin(steps_[next], num_steps_[next]);
    auto ahead = spread(far);
    auto nothing = [] {};
    bool is_first = true;
    for (int64_t row = 0; row < num_rows_; row += Memory::kBlockRows) {
      KeyBlock key_block;
      if (!find_visible_keys(m_, row, vectors_of(row) * kLanes, key, count, key_block)) continue;
      is_first ? attend_block(key_block, ahead) : attend_block(key_block, nothing);
      is_first = false;
    }
  }

  template <typename Prefetch>
  void attend_block(const KeyBlock& key_block, Prefetch& ahead) {
    switch (vectors_of(key_block.row)) {
      case 1:
        return attend_vectors<1>(key_block, ahead);
      case 2:
        return attend_vectors<2>(key_block, ahead);
      case 3:
        if constexpr (Memory::kBlockVectors > 2) attend_vectors<3>(key_block, ahead);
        return;
      default:
        if constexpr (Memory::kBlockVectors > 2) attend_vectors<4>(key_block, ahead);
    }
  }

  template <int kVectors, typename Prefetch>
  __attribute__((noinline)) void attend_vectors(const KeyBlock& key_block, Prefetch& ahead) {
    // 16 sums, or 12 of three vectors; 8 where there are no more registers.
    constexpr int kSums = kLanes == 8 ? 8 : 16, kGroup = kVectors == 3 ? 4 : kSums / kVectors;
    constexpr int kDims = kGroup < kPair ? kGroup : kPair;
    static_assert(kStepKeys % kGroup == 0 && kPair % kDims == 0);
    constexpr int kWidth = kVectors * kLanes;
    const int first = key_block.first_step * kStepKeys, last = key_block.last_step * kStepKeys;
    const float* q = m_.q + key_block.row * columns_;
    for (int key = first; key < last; key += kGroup) {
      score_keys<kGroup, kVectors>(q, key, ahead);
    }
    for (int i = 0; i < kVectors; ++i) {
      weigh<kWidth>(key_block, key_block.row + i * kLanes, m_.scores + i * kLanes);
    }
    float* acc = m_.acc + key_block.row * v_columns_;
    for (int64_t d = 0; d < v_columns_; d += kDims) {
      add_values<kDims, kVectors>(first, last, d, acc + d * kWidth, ahead);
    }
  }

  // scores [kKeys, kVectors vectors] of the keys from `key` on. A sum of more than kChain products
  // is one of sums: a chain of 128 had three times the rounding error, and 1 % more speed.
  template <int kKeys, int kVectors, typename Prefetch>
  void score_keys(const float* q, int key, Prefetch& ahead) {
    constexpr int64_t kChain = 32;
    float* scores = m_.scores + key * kVectors * kLanes;
    for (int64_t first = 0; first < columns_; first += kChain) {
      const int64_t last = first + kChain < columns_ ? first + kChain : columns_;
      const float* k = m_.k + key * columns_;
      Vec sums[kKeys][kVectors];
      for (int i = 0; i < kKeys; ++i) {
        for (int j = 0; j < kVectors; ++j) sums[i][j] = zero();
      }
      for (int64_t d = first; d < last; ++d, q += kVectors * kLanes) {
        ahead();
        Vec of_rows[kVectors];
        for (int j = 0; j < kVectors; ++j) of_rows[j] = load(q + j * kLanes);
        for (int i = 0; i < kKeys; ++i) {
          const Vec element = broadcast(k[i * columns_ + d]);
          for (int j = 0; j < kVectors; ++j) sums[i][j] = fma(of_rows[j], element, sums[i][j]);
        }
      }
      for (int i = 0; i < kKeys; ++i) {
        for (int j = 0; j < kVectors; ++j) {
          float* out = scores + (i * kVectors + j) * kLanes;
          store(out, first == 0 ? sums[i][j] : add(load(out), sums[i][j]));
        }
      }
    }
  }

  // acc [kDims, kVectors vectors] += the dims from `d` on of values [first, last) times weights.
  // The sum of a block of keys is added as one number: see RowState.
  template <int kDims, int kVectors, typename Prefetch>
  void add_values(int first, int last, int64_t d, float* acc, Prefetch& ahead) {
    const float* v = m_.v + first * v_stride_ + d;
    const float* weights = m_.scores + first * kVectors * kLanes;
    Vec sums[kDims][kVectors];
    for (int i = 0; i < kDims; ++i) {
      for (int j = 0; j < kVectors; ++j) sums[i][j] = zero();
    }
    for (int key = first; key < last; ++key, v += v_stride_, weights += kVectors * kLanes) {
      ahead();
      Vec of_rows[kVectors];
      for (int j = 0; j < kVectors; ++j) of_rows[j] = load(weights + j * kLanes);
      for (int i = 0; i < kDims; ++i) {
        const Vec element = broadcast(v[i]);
        for (int j = 0; j < kVectors; ++j) sums[i][j] = fma(of_rows[j], element, sums[i][j]);
      }
    }
    for (int i = 0; i < kDims; ++i) {
      for (int j = 0; j < kVectors; ++j) {
        float* out = acc + (i * kVectors + j) * kLanes;
        store(out, add(load(out), sums[i][j]));
      }
    }
  }

  // Scores of a vector of rows, kWidth apart, to weights.
  template <int kWidth>
  void weigh(const KeyBlock& key_block, int64_t row, float* scores) {
    const int first = key_block.first_step * kStepKeys, last = key_block.last_step * kStepKeys;
    if (kIsScaled<T> || p_.softcap != 0.0f) {
      const Vec cap = broadcast(p_.softcap * kLog2E);
      for (int key = first; key < last; ++key) {
        Vec score = load(scores + key * kWidth);
        if constexpr (kIsScaled<T>) score = mul(score, broadcast(m_.k_scale[key]));
        if (p_.softcap != 0.0f) score = mul(tanh(score), cap);
        store(scores + key * kWidth, score);
      }
    }
    if (key_block.masked) mask(key_block, row, scores, kWidth);
    Vec largest[2] = {load(scores + first * kWidth), load(scores + (first + 1) * kWidth)};
    for (int key = first + 2; key < last; key += 2) {
      largest[0] = max_keep_nan(largest[0], load(scores + key * kWidth));
      largest[1] = max_keep_nan(largest[1], load(scores + (key + 1) * kWidth));
    }
    raise_base(row, max_keep_nan(largest[0], largest[1]), kWidth);
    const Vec base = load(m_.base + row);
    Vec sums[2] = {zero(), zero()};
    for (int key = first; key < last; ++key) {
      float* of_key = scores + key * kWidth;
      const Vec weight = exp2_nonpositive(sub(load(of_key), base));
      sums[key % 2] = add(sums[key % 2], weight);
      if constexpr (kIsScaled<T>) {
        store(of_key, mul(weight, broadcast(m_.v_scale[key])));
      } else {
        store(of_key, weight);
      }
    }
    float of_lanes[kLanes];
    store(of_lanes, add(sums[0], sums[1]));
    for (int i = 0; i < kLanes; ++i) m_.sum[row + i] += of_lanes[i];
  }

  // Scores of keys that a row does not see become -inf.
  void mask(const KeyBlock& key_block, int64_t row, float* scores, int64_t width) const {
    float begin[kLanes], end[kLanes];  // counted from the first key of the block, and exact
    for (int i = 0; i < kLanes; ++i) {
      begin[i] = place_in_block(m_.begin[row + i] - key_block.key);
      end[i] = place_in_block(m_.end[row + i] - key_block.key);
    }
    const Vec nothing = broadcast(-INFINITY);
    for (int key = key_block.first_step * kStepKeys; key < key_block.last_step * kStepKeys; ++key) {
      const float bound = static_cast<float>(key) + 0.5f;
      const Vec begun = select_below(load(begin), bound, load(scores + key * width), nothing);
      store(scores + key * width, select_below(load(end), bound, nothing, begun));
    }
  }
  static float place_in_block(int64_t key) {
    return static_cast<float>(key < 0 ? 0 : key < Memory::kBlockKeys ? key : Memory::kBlockKeys);
  }

  // Raises the bases of rows whose largest scores exceed them by too much.
  void raise_base(int64_t row, Vec largest, int64_t width) {
    const Vec base = load(m_.base + row);
    const Vec room = sub(add(base, broadcast(kBaseSlack)), largest);  // below 0: too much
    // NaN is not below 0, and its row is computed again.
    if (!(reduce_max(select_below(room, 0.0f, broadcast(1.0f), zero())) > 0.0f)) return;
    const Vec new_base = select_below(room, 0.0f, largest, base);
    store(m_.base + row, new_base);
    const Vec factor = exp2_nonpositive(sub(base, new_base));
    float* acc = column_of(m_.acc, row, v_columns_);
    for (int64_t d = 0; d < v_columns_; ++d, acc += width) store(acc, mul(load(acc), factor));
    float of_lanes[kLanes];
    store(of_lanes, factor);
    for (int i = 0; i < kLanes; ++i) m_.sum[row + i] *= of_lanes[i];
  }

  // Adds sums since the last flush to the totals.
  void flush() {
    for (int64_t row = 0; row < num_rows_; row += kLanes) {
      const Vec base = load(m_.base + row);
      const Vec factor = exp2_nonpositive(sub(load(m_.total_base + row), base));
      float* acc = column_of(m_.acc, row, v_columns_);
      float* total = column_of(m_.total, row, v_columns_);
      for (int64_t i = 0; i < v_columns_ * width_of(row); i += width_of(row)) {
        store(total + i, fma(load(total + i), factor, load(acc + i)));
        store(acc + i, zero());
      }
      store(m_.total_base + row, base);
    }
  }

  // False if o is not finite.
  bool normalise(float* o, float* lse) {
    float* of_row = m_.v;  // no longer of values
    Vec not_finite = zero();
    for (int64_t row = 0; row < rows_.count; ++row) {
      const float* total = column_of(m_.total, row, v_columns_);
      for (int64_t d = 0; d < v_columns_; ++d) of_row[d] = total[d * width_of(row)];
      for (int64_t d = 0; d < v_columns_; d += kLanes) {
        not_finite = fma(load(of_row + d), zero(), not_finite);  // NaN of infinity, too
      }
      const float sum = static_cast<float>(m_.sum[row]);
      lse[row] = lse_of(m_.base[row], m_.sum[row]);
      store_scaled_sums<T>(p_, of_row, sum == 0.0f ? 0.0f : 1.0f / sum, o + row * p_.head_dim_v);
    }
    return reduce_add(not_finite) == 0.0f;
  }

  const DecodeParams& p_;
  const Rows& rows_;
  const Keys<T> keys_;
  const KeyRange range_;
  const Memory m_;
  const int64_t num_rows_, columns_, v_columns_, v_stride_;
  Step<T> steps_[2][Memory::kBlockSteps];  // of the keys of this block, and of the next
  int num_steps_[2] = {};
};

}  // namespace
}  // namespace tree_attention::cpu
