// SPDX-License-Identifier: BSD-3-Clause
//
// Many rows with AVX-512's products of pairs of bfloat16, for bfloat16 queries. K is read where it
// lies: two dims of a key are broadcast to all lanes, which are rows. V is packed in pairs of keys,
// once for all rows.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/bf16/column_softmax.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/arrays.h"
#include "cpu/vector/far_prefetch.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"

namespace tree_attention::cpu {
namespace {

constexpr int kBlockVectors = 4;  // vectors of rows that attend to packed keys at a time
constexpr int kBlockRows = kBlockVectors * kLanes;
constexpr int kFewestManyRows = 12;  // with fewer, empty lanes cost more than they save
// Words between the packed pairs of keys, whose lines would share a few sets of the cache.
constexpr int kPaddingWords = 16;

// Memory of one call. The rows of a block are `width` lanes wide: kBlockRows, or less in the last;
// acc and total are [blocks, head_dim_v, width].
struct PairRowsMemory : RowArrays {
  uint32_t* q;               // [blocks, head_dim / 2, width]: pairs of dims
  BFloat16* k;               // [kPackedKeys, head_dim], of keys of 8 bits
  uint32_t* v;               // [kPackedKeys / 2, head_dim_v + kPaddingWords]: pairs of keys
  float *k_scale, *v_scale;  // [kPackedKeys], of keys of 8 bits
  float* scores;             // [kPackedKeys, width], of one block
  size_t num_bytes;

  static bool supports(const DecodeParams& p) {
    return p.dtype == DataType::kBFloat16 && p.head_dim % kPair == 0 && p.head_dim_v % kPair == 0 &&
           int64_t{p.group_size()} * p.seqlen_q >= kFewestManyRows;
  }
  static int64_t padded_rows(int64_t num_rows) { return (num_rows + kLanes - 1) / kLanes * kLanes; }
  static size_t bytes(const DecodeParams& p, int64_t num_rows) {
    return PairRowsMemory(p, num_rows, nullptr).num_bytes;
  }
  PairRowsMemory(const DecodeParams& p, int64_t num_rows, void* memory) {
    num_rows = padded_rows(num_rows);
    const bool has_copies = p.kv_dtype != DataType::kBFloat16;
    Arrays arrays(memory);
    arrays.take(q, num_rows * p.head_dim / 2);
    arrays.take(k, has_copies ? kPackedKeys * p.head_dim : 0);
    arrays.take(v, kPackedKeys / 2 * (p.head_dim_v + kPaddingWords));
    arrays.take(k_scale, kPackedKeys);
    arrays.take(v_scale, kPackedKeys);
    arrays.take(scores, kPackedKeys * kBlockRows);
    take(arrays, num_rows, p.head_dim_v);
    num_bytes = arrays.bytes();
  }
};

// scores [kKeys, kVectors vectors] = k [kKeys, head_dim] times q [head_dim / 2, kVectors vectors].
template <int kKeys, int kVectors, typename Prefetch>
inline void score_keys(const BFloat16* const* k, const uint32_t* q, int64_t head_dim, float* scores,
                       Prefetch& ahead) {
  Vec sums[kKeys][kVectors];
  const BFloat16* rows[kKeys];
  for (int key = 0; key < kKeys; ++key) {
    rows[key] = k[key];
    for (int i = 0; i < kVectors; ++i) sums[key][i] = zero();
  }
  for (int64_t d = 0; d < head_dim; d += 2, q += kVectors * kLanes) {
    ahead();
    __m512i of_rows[kVectors];
    for (int i = 0; i < kVectors; ++i) of_rows[i] = _mm512_load_si512(q + i * kLanes);
    for (int key = 0; key < kKeys; ++key) {
      const __m512i pair = broadcast_pair(rows[key] + d);
      for (int i = 0; i < kVectors; ++i) sums[key][i] = dot(of_rows[i], pair, sums[key][i]);
    }
  }
  for (int key = 0; key < kKeys; ++key) {
    for (int i = 0; i < kVectors; ++i) {
      store(scores + (key * kVectors + i) * kLanes, sums[key][i]);
    }
  }
}

// acc [kDims, kVectors vectors] += v [num_pairs, kDims] times weights [num_pairs, 2 terms, kVectors
// vectors], of which kTerms are used.
template <int kDims, int kVectors, int kTerms, typename Prefetch>
inline void add_values(const uint32_t* v, int64_t v_stride, const float* weights, int num_pairs,
                       float* acc, Prefetch& ahead) {
  Vec sums[kDims][kVectors];
  for (int d = 0; d < kDims; ++d) {
    for (int i = 0; i < kVectors; ++i) sums[d][i] = load(acc + (d * kVectors + i) * kLanes);
  }
  for (int pair = 0; pair < num_pairs; ++pair, v += v_stride, weights += 2 * kVectors * kLanes) {
    ahead();
    __m512i terms[kTerms][kVectors];
    for (int term = 0; term < kTerms; ++term) {
      for (int i = 0; i < kVectors; ++i) {
        terms[term][i] = _mm512_load_si512(weights + (term * kVectors + i) * kLanes);
      }
    }
    for (int d = 0; d < kDims; ++d) {
      const __m512i values = broadcast_pair(v + d);
      for (int i = 0; i < kVectors; ++i) {
        for (int term = 0; term < kTerms; ++term) {
          sums[d][i] = dot(terms[term][i], values, sums[d][i]);
        }
      }
    }
  }
  for (int d = 0; d < kDims; ++d) {
    for (int i = 0; i < kVectors; ++i) store(acc + (d * kVectors + i) * kLanes, sums[d][i]);
  }
}

// A row that does not see every key of a block has those masked: their scores become -inf and
// their weights 0. That is wrong only where a value is not finite, and then the output is computed
// again.
template <typename T>
class PairRowsAttention {
 public:
  PairRowsAttention(const DecodeParams& p, const Rows& rows, KeyRange range, void* workspace)
      : p_(p),
        rows_(rows),
        keys_(p, rows),
        range_(range),
        m_(p, rows.count, workspace),
        num_rows_(PairRowsMemory::padded_rows(rows.count)),
        v_stride_(p.head_dim_v + kPaddingWords),
        adjusted_(p.softcap != 0.0f || p.alibi_slopes != nullptr || !(score_scale(p) > 0.0f)),
        scale_(adjusted_ ? 1.0f : score_scale(p)) {}

  // False if o and lse are not what they should be: few rows at a time have to compute them.
  bool run(float* o, float* lse) {
    if (!locate_ranges(p_, rows_, range_, num_rows_, m_)) return false;
    pack_queries();
    for (int64_t i = 0; i < num_rows_ * p_.head_dim_v; i += kLanes) {
      store(m_.acc + i, zero());
      store(m_.total + i, zero());
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      m_.base[row] = m_.total_base[row] = kNoBase;
      m_.sum[row] = 0.0;
    }
    locate_packed(0);
    for (int64_t key = 0; key < num_keys(); key += kPackedKeys) {
      if (key > 0 && key % kFlushKeys == 0) flush_rows();
      attend_packed(key);
    }
    flush_rows();
    return !too_large_ && normalise_rows(o, lse);
  }

 private:
  int64_t num_keys() const { return range_.end - range_.begin; }
  static int place_of(int64_t key) { return static_cast<int>(key / kPackedKeys % 2); }

  int vectors_of(int64_t block) const {
    const int64_t left = (num_rows_ - block) / kLanes;
    return left < kBlockVectors ? static_cast<int>(left) : kBlockVectors;
  }
  // The floats from one column of o to the next, for the vector of rows that begins at `row`.
  int64_t stride_of(int64_t row) const {
    return vectors_of(row / kBlockRows * kBlockRows) * kLanes;
  }
  float* sums_of(float* sums, int64_t row) const {
    return sums + row / kBlockRows * kBlockRows * p_.head_dim_v + row % kBlockRows;
  }

  void pack_queries() {
    for (int64_t row = 0; row < num_rows_; row += kLanes) {
      const BFloat16* sources[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        sources[i] = row + i < rows_.count ? query_of_row<BFloat16>(p_, rows_, row + i) : nullptr;
      }
      uint32_t* out = m_.q + row / kBlockRows * kBlockRows * p_.head_dim / 2 + row % kBlockRows;
      for (int64_t d = 0; d < p_.head_dim; d += kPair) {
        __m512i pairs[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          pairs[i] = sources[i] == nullptr ? __m512i{} : _mm512_loadu_si512(sources[i] + d);
          if constexpr (kIsScaled<T>) pairs[i] = interleave_halves(pairs[i]);
        }
        transpose(pairs);
        for (int i = 0; i < kLanes; ++i, out += stride_of(row)) _mm512_store_si512(out, pairs[i]);
      }
    }
  }

  // Finds the keys that are packed together from `key` on.
  void locate_packed(int64_t key) {
    const int place = place_of(key);
    Step<T>* step = steps_[place];
    const int64_t begin = range_.begin + key;
    const int64_t end = begin + kPackedKeys < range_.end ? begin + kPackedKeys : range_.end;
    for (int64_t i = begin; i < end; i += kStepKeys) {
      keys_.locate(i, end_of_step(i, end), *step++);
    }
    num_steps_[place] = static_cast<int>(step - steps_[place]);
  }

  void attend_packed(int64_t key) {
    const int place = place_of(key), next = 1 - place;
    const int64_t left = num_keys() - key;
    num_steps_[next] = 0;
    if (left > kPackedKeys) locate_packed(key + kPackedKeys);
    for (int i = 0; i < num_steps_[place]; ++i) pack_step(steps_[place][i], i);
    FarPrefetch<T> far(p_.head_dim, p_.head_dim_v);
    far.begin(steps_[next], num_steps_[next]);
    auto ahead = spread(far);
    auto nothing = [] {};
    bool is_first = true;
    for (int64_t row = 0; row < num_rows_; row += kBlockRows) {
      KeyBlock key_block;
      const int64_t num_packed = left < kPackedKeys ? left : kPackedKeys;
      if (!find_visible_keys(m_, row, vectors_of(row) * kLanes, key, num_packed, key_block))
        continue;
      is_first ? attend_block(key_block, ahead) : attend_block(key_block, nothing);
      is_first = false;
    }
  }

  // Keys of 8 bits to bfloat16, and values to pairs; those past the end of the step are zeros.
  void pack_step(const Step<T>& step, int index) {
    const int first = index * kStepKeys;
    if constexpr (kIsScaled<T>) {
      BFloat16* copy = m_.k + first * p_.head_dim;
      convert_keys(step, 0, kStepKeys, 0, p_.head_dim, p_.head_dim, copy);
      for (int i = 0; i < kStepKeys; ++i) packed_k_[first + i] = copy + i * p_.head_dim;
      __builtin_memcpy(m_.k_scale + first, step.k_scale, sizeof(step.k_scale));
      __builtin_memcpy(m_.v_scale + first, step.v_scale, sizeof(step.v_scale));
    } else {
      __builtin_memcpy(packed_k_ + first, step.k, kStepKeys * sizeof(step.k[0]));
    }
    [[maybe_unused]] alignas(64) static constexpr T zeros[kPair] = {};
    const __m512i first_words =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i last_words = _mm512_or_si512(first_words, _mm512_set1_epi16(16));
    for (int i = 0; i < kStepKeys; i += 2) {
      uint32_t* out = m_.v + (first + i) / 2 * v_stride_;
      const bool has_first = i < step.count, has_second = i + 1 < step.count;
      for (int64_t d = 0; d < p_.head_dim_v; d += kPair) {
        __m512i low, high;
        if constexpr (kIsScaled<T>) {
          pair_rows(has_first ? step.v[i] + d : zeros, has_second ? step.v[i + 1] + d : zeros, low,
                    high);
        } else {
          const __m512i a = has_first ? _mm512_loadu_si512(step.v[i] + d) : __m512i{};
          const __m512i b = has_second ? _mm512_loadu_si512(step.v[i + 1] + d) : __m512i{};
          low = _mm512_permutex2var_epi16(a, first_words, b);
          high = _mm512_permutex2var_epi16(a, last_words, b);
        }
        _mm512_store_si512(out + d, low);
        _mm512_store_si512(out + d + kLanes, high);
      }
    }
  }

  template <typename Prefetch>
  void attend_block(const KeyBlock& key_block, Prefetch& ahead) {
    const auto with_vectors = [&]<int kVectors>() {
      if (weights_need_two_terms(p_)) {
        attend_vectors_of<kVectors, 2>(key_block, ahead);
      } else {
        attend_vectors_of<kVectors, 1>(key_block, ahead);
      }
    };
    switch (vectors_of(key_block.row)) {
      case 1:
        return with_vectors.template operator()<1>();
      case 2:
        return with_vectors.template operator()<2>();
      case 3:
        return with_vectors.template operator()<3>();
      default:
        return with_vectors.template operator()<4>();
    }
  }

  template <int kVectors, int kTerms, typename Prefetch>
  __attribute__((noinline)) void attend_vectors_of(const KeyBlock& key_block, Prefetch& ahead) {
    // 16 sums in registers, 12 of three vectors.
    constexpr int kKeys = kVectors <= 2 ? 8 : 4, kDims = kVectors == 3 ? 4 : 16 / kVectors;
    constexpr int kWidth = kVectors * kLanes;
    const int first = key_block.first_step * kStepKeys, last = key_block.last_step * kStepKeys;
    const uint32_t* q = m_.q + key_block.row * p_.head_dim / 2;
    for (int key = first; key < last; key += kKeys) {
      score_keys<kKeys, kVectors>(packed_k_ + key, q, p_.head_dim, m_.scores + key * kWidth, ahead);
    }
    for (int i = 0; i < kVectors; ++i) {
      weigh_rows<kWidth, kTerms>(key_block, key_block.row + i * kLanes, m_.scores + i * kLanes);
    }
    const uint32_t* v = m_.v + first / 2 * v_stride_;
    float* acc = m_.acc + key_block.row * p_.head_dim_v;
    for (int64_t d = 0; d < p_.head_dim_v; d += kDims) {
      add_values<kDims, kVectors, kTerms>(v + d, v_stride_, m_.scores + first * kWidth,
                                          (last - first) / 2, acc + d * kWidth, ahead);
    }
  }

  // Scores of a vector of rows, kWidth apart, to weights in pairs of keys.
  template <int kWidth, int kTerms>
  void weigh_rows(const KeyBlock& key_block, int64_t row, float* scores) {
    const int first = key_block.first_step * kStepKeys, last = key_block.last_step * kStepKeys;
    if constexpr (kIsScaled<T>) {
      for (int key = first; key < last; ++key) {
        float* of_key = scores + key * kWidth;
        store(of_key, mul(load(of_key), broadcast(m_.k_scale[key])));
      }
    }
    if (adjusted_) adjust<kWidth>(key_block, row, scores);
    if (key_block.masked) mask_scores(m_, key_block, row, scores, kWidth);
    const Vec scale = broadcast(scale_);
    too_large_ |= !raise_base(p_, m_, key_block, row, scores, scale, sums_of(m_.acc, row), kWidth);
    const Vec offset = sub(broadcast(kRoundToInteger), load(m_.base + row));
    Vec sums[2] = {zero(), zero()};
    for (int key = first; key < last; key += 2) {
      float* pair = scores + key * kWidth;
      Vec a = exp2_above(load(pair), scale, offset);
      Vec b = exp2_above(load(pair + kWidth), scale, offset);
      sums[0] = add(sums[0], a);
      sums[1] = add(sums[1], b);
      if constexpr (kIsScaled<T>) {
        a = mul(a, broadcast(m_.v_scale[key]));
        b = mul(b, broadcast(m_.v_scale[key + 1]));
      }
      store_weight_pairs<kTerms>(a, b, pair, kWidth);
    }
    add_to_sums(m_.sum + row, add(sums[0], sums[1]));
  }

  template <int kWidth>
  void adjust(const KeyBlock& key_block, int64_t row, float* scores) const {
    const int64_t last_row = row + kLanes < rows_.count ? row + kLanes : rows_.count;
    for (int step = key_block.first_step; step < key_block.last_step; ++step) {
      const int64_t key = range_.begin + key_block.key + step * kStepKeys;
      const int64_t count = end_of_step(key, range_.end) - key;
      float columns[kStepKeys * kLanes];
      float* of_step = scores + step * kStepKeys * kWidth;
      for (int i = 0; i < kStepKeys; ++i) store(columns + i * kLanes, load(of_step + i * kWidth));
      adjust_columns<kLanes>(p_, rows_, row, last_row, key, static_cast<int>(count), columns);
      for (int i = 0; i < kStepKeys; ++i) store(of_step + i * kWidth, load(columns + i * kLanes));
    }
  }

  void flush_rows() {
    for (int64_t row = 0; row < num_rows_; row += kLanes) {
      flush_sums(p_, m_, row, sums_of(m_.acc, row), sums_of(m_.total, row), stride_of(row));
    }
  }

  bool normalise_rows(float* o, float* lse) const {
    bool finite = true;
    for (int64_t row = 0; row < rows_.count; row += kLanes) {
      const int64_t count = row + kLanes < rows_.count ? kLanes : rows_.count - row;
      finite &= normalise_sums(
          p_, m_, row, count, sums_of(m_.total, row), stride_of(row), [](int64_t d) { return d; },
          o + row * p_.head_dim_v, lse + row);
    }
    return finite;
  }

  const DecodeParams& p_;
  const Rows& rows_;
  const Keys<T> keys_;
  const KeyRange range_;
  const PairRowsMemory m_;
  const int64_t num_rows_, v_stride_;
  const bool adjusted_;
  const float scale_;
  bool too_large_ = false;
  Step<T> steps_[2][kPackedSteps];  // of these packed keys, and of the next
  int num_steps_[2] = {};
  const BFloat16* packed_k_[kPackedKeys];
};

}  // namespace
}  // namespace tree_attention::cpu
