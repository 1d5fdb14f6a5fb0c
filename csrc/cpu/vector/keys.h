// SPDX-License-Identifier: BSD-3-Clause
//
// Where keys and values lie. They are taken in steps of up to kStepKeys keys, which all rows use
// before the next ones are loaded.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

constexpr int kPair = 2 * kLanes;
constexpr int kStepKeys = 32;
constexpr bool kShortVectors = kLanes == 4;  // rows are many of them

// head_dim rounded up to whole pairs of vectors, which is what a row takes in scratch memory.
inline int64_t padded(int64_t head_dim) { return (head_dim + kPair - 1) / kPair * kPair; }

// out [padded(head_dim)] = a row in float32, in the lane order of its type, padded with zeros.
template <typename T>
inline void widen_row(const T* row, int64_t head_dim, float* out) {
  for (int64_t d = 0; d < head_dim; d += kPair) {
    Vec even, odd;
    if (d + kPair <= head_dim) {
      load_pair(row + d, even, odd);
    } else {
      load_pair(row + d, static_cast<int>(head_dim - d), even, odd);
    }
    store(out + d, even);
    store(out + d + kLanes, odd);
  }
}

constexpr int kLineBytes = 64;  // of a cache line

// Whether keys and values are multiplied by scales of their tokens.
template <typename T>
constexpr bool kIsScaled = false;
template <>
constexpr bool kIsScaled<Int8> = true;
template <>
constexpr bool kIsScaled<Float8> = true;

template <bool kScaled>
struct Scales {};
template <>
struct Scales<true> {
  float k_scale[kStepKeys], v_scale[kStepKeys];
};

// Where the rows of a step's keys and values lie, and their scales. A block of kKeyBlock may read
// past the last entry, which is therefore repeated.
template <typename T>
struct Step : Scales<kIsScaled<T>> {
  const T* k[kStepKeys + kKeyBlock];
  const T* v[kStepKeys + kKeyBlock];
  int count;
};

// The end of the step that begins at `begin`, of keys up to `end`.
inline int64_t end_of_step(int64_t begin, int64_t end) {
  return begin + kStepKeys < end ? begin + kStepKeys : end;
}

// The keys and values, of elements T, that the rows of an output see: contiguous or in pages.
template <typename T>
class Keys {
 public:
  Keys(const DecodeParams& p, const Rows& rows) : p_(p), rows_(rows) {}

  // Sets `step` to the keys [begin, end).
  void locate(int64_t begin, int64_t end, Step<T>& step) const {
    const int count = static_cast<int>(end - begin);
    if (count < 1) __builtin_unreachable();
    for_addresses(begin, count, [&](int i, const T* k, const T* v) {
      step.k[i] = k;
      step.v[i] = v;
    });
    for (int i = count; i < kStepKeys + kKeyBlock; ++i) {
      step.k[i] = step.k[count - 1];
      step.v[i] = step.v[count - 1];
    }
    step.count = count;
    if constexpr (kIsScaled<T>) {
      load_scales(begin, count, p_.k_scale, p_.k_scale_stride, step.k_scale);
      load_scales(begin, count, p_.v_scale, p_.v_scale_stride, step.v_scale);
    }
  }

  // Calls body(i, address of key i, address of value i) for keys [begin, begin + count).
  template <typename Body>
  void for_addresses(int64_t begin, int count, const Body& body) const {
    for_runs(begin, count, [&](int i, int end, int64_t outer, int64_t token) {
      const T* k = static_cast<const T*>(p_.k) + outer * p_.k_stride[0] +
                   rows_.head_kv * p_.k_stride[1] + token * p_.k_stride[2];
      const T* v = static_cast<const T*>(p_.v) + outer * p_.v_stride[0] +
                   rows_.head_kv * p_.v_stride[1] + token * p_.v_stride[2];
      for (; i < end; ++i, k += p_.k_stride[2], v += p_.v_stride[2]) body(i, k, v);
    });
  }

  // Fetches the scales of keys [begin, begin + count) where they are contiguous.
  void prefetch_scales(int64_t begin, int count) const {
    const auto fetch = [&](const float* scale, const int64_t (&stride)[3]) {
      if (scale == nullptr || stride[2] != 1) return;
      for_runs(begin, count, [&](int i, int end, int64_t outer, int64_t token) {
        const float* of_run =
            scale + outer * stride[0] + rows_.head_kv * stride[1] + token * stride[2];
        for (; i < end; i += kLineBytes / sizeof(float), of_run += kLineBytes / sizeof(float)) {
          __builtin_prefetch(of_run);
        }
      });
    };
    fetch(p_.k_scale, p_.k_scale_stride);
    fetch(p_.v_scale, p_.v_scale_stride);
  }

 private:
  // Calls run(i, end, outer, token) for the runs of keys [begin, begin + count) that lie one after
  // another: keys [begin + i, begin + end) are the tokens from `token` on of sequence or page
  // `outer`.
  template <typename Run>
  void for_runs(int64_t begin, int count, const Run& run) const {
    if (p_.page_table == nullptr) {
      run(0, count, rows_.batch, begin);
      return;
    }
    const int32_t* pages = p_.page_table + rows_.batch * p_.page_table_stride[0] +
                           rows_.head_kv * p_.page_table_stride[1];
    int64_t page = begin / p_.page_size, slot = begin % p_.page_size;
    for (int i = 0, end; i < count; i = end, ++page, slot = 0) {
      const int64_t left = p_.page_size - slot;
      end = left < count - i ? i + static_cast<int>(left) : count;
      run(i, end, pages[page], slot);
    }
  }

  // out [kStepKeys] = the scales of keys [begin, begin + count), the last of which is repeated.
  void load_scales(int64_t begin, int count, const float* scale, const int64_t (&stride)[3],
                   float* out) const {
    if (scale == nullptr) {
      for (int i = 0; i < kStepKeys; ++i) out[i] = 1.0f;
      return;
    }
    for_runs(begin, count, [&](int i, int end, int64_t outer, int64_t token) {
      const float* of_run =
          scale + outer * stride[0] + rows_.head_kv * stride[1] + token * stride[2];
      if (stride[2] == 1) {
        __builtin_memcpy(out + i, of_run, (end - i) * sizeof(float));
        return;
      }
      for (; i < end; ++i, of_run += stride[2]) out[i] = *of_run;
    });
    for (int i = count; i < kStepKeys; ++i) out[i] = out[count - 1];
  }

  const DecodeParams& p_;
  const Rows& rows_;
};

}  // namespace
}  // namespace tree_attention::cpu
