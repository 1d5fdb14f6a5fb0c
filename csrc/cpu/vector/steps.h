// SPDX-License-Identifier: BSD-3-Clause
//
// Steps of keys one after another, and the keys far ahead that are fetched meanwhile.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "cpu/vector/keys.h"

namespace tree_attention::cpu {
namespace {

// With this many keys or more, keys are fetched into the second-level cache well ahead of the
// steps: fewer may lie in a cache already, where fetching only costs instructions.
constexpr int64_t kManyKeys = 1024;

// The keys that are fetched into the second-level cache while some steps are computed. A core keeps
// only 16 lines in flight; its second-level cache keeps more, but fetches ahead only within 4 KiB
// and after some lines of them. So the window is walked in kPlaces places at once, half of them of
// keys and half of values, 4 KiB or more apart where keys are contiguous. AVX2 has fewer: it is
// what AMD's cores before Zen 4 have, where eight places took 1.2 times as long as four.
template <typename T>
class Window {
 public:
  static constexpr int kPlaces = kLanes == 8 ? 4 : 8;

  explicit Window(const DecodeParams& p)
      : k_end_(p.head_dim),
        v_end_(p.head_dim_v),
        place_keys_(p.head_dim * sizeof(T) < 256 ? kMaxPlaceKeys : kMaxPlaceKeys / 2) {}

  int64_t num_keys() const { return kPlaces / 2 * place_keys_; }

  // Makes this the window of keys [begin, end), at most num_keys().
  void locate(const Keys<T>& keys, int64_t begin, int64_t end) {
    const int count = static_cast<int>(end - begin);
    keys.for_addresses(begin, count, [&](int i, const T* k, const T* v) {
      k_[i] = k;
      v_[i] = v;
    });
    for (int i = count; i < num_keys(); ++i) {
      k_[i] = k_[count - 1];
      v_[i] = v_[count - 1];
    }
    if constexpr (kIsScaled<T>) keys.prefetch_scales(begin, count);
    key_ = d_ = 0;
  }

  // Fetches a line of each place.
  void fetch() {
    if (key_ == place_keys_) return;
    if (d_ < k_end_) fetch_lines(k_ + key_);
    if (d_ < v_end_) fetch_lines(v_ + key_);
    d_ += kLine;
    if (d_ < k_end_ || d_ < v_end_) return;
    d_ = 0;
    ++key_;
  }

 private:
  static constexpr int kMaxPlaceKeys = 32, kLine = kLineBytes / sizeof(T);

  void fetch_lines(const T* const* keys) const {
    asm volatile("");  // or gcc leaves out calls of a function that only prefetches
    for (int i = 0; i < kPlaces / 2; ++i, keys += place_keys_) __builtin_prefetch(*keys + d_, 0, 2);
  }

  const T *k_[kPlaces / 2 * kMaxPlaceKeys], *v_[kPlaces / 2 * kMaxPlaceKeys];
  const int64_t k_end_, v_end_, place_keys_;
  int64_t key_ = 0, d_ = 0;
};

// The lines of the keys and values two steps ahead, fetched into the second-level cache while as
// many lines are used. Inlined, because gcc takes a call that only prefetches for one without
// effect.
template <typename T>
class LinesAhead {
 public:
  explicit LinesAhead(const DecodeParams& p)
      : k_bytes_(p.head_dim * sizeof(T)), v_bytes_(p.head_dim_v * sizeof(T)) {}

  static int64_t num_keys() { return kStepKeys; }

  // Makes these the lines of keys [begin, end).
  void locate(const Keys<T>& keys, int64_t begin, int64_t end) {
    const int count = static_cast<int>(end - begin);
    keys.for_addresses(begin, count, [&](int i, const T* k, const T* v) {
      k_[i] = k;
      v_[i] = v;
    });
    for (int i = count; i < kStepKeys; ++i) {
      k_[i] = k_[count - 1];
      v_[i] = v_[count - 1];
    }
    if constexpr (kIsScaled<T>) keys.prefetch_scales(begin, count);
  }

  __attribute__((always_inline)) void fetch_key(int key) const { fetch(k_[key], k_bytes_); }
  __attribute__((always_inline)) void fetch_value(int key) const { fetch(v_[key], v_bytes_); }

 private:
  __attribute__((always_inline)) static void fetch(const T* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const char*>(row) + i, 0, 2);
    }
  }

  const int64_t k_bytes_, v_bytes_;
  const T *k_[kStepKeys], *v_[kStepKeys];
};

// Calls body(first key, step, next step, window) for the steps of [begin, end). The step after the
// last one has the keys up to `limit`, or is the last one itself where there are none. The window
// begins more than a window's keys later; it is null where there are few keys or none so far.
// Window: a Window<T>, or what an instruction set fetches instead.
template <typename T, typename Window, typename Body>
inline void for_steps(const DecodeParams& p, const Keys<T>& keys, int64_t begin, int64_t end,
                      int64_t limit, const Body& body) {
  Step<T> steps[2];
  Window window(p);
  bool has_window = false;
  int64_t next_window = limit - begin < kManyKeys ? limit : begin;
  keys.locate(begin, end_of_step(begin, end), steps[0]);
  for (int current = 0; begin < end; current = 1 - current) {
    const int64_t next = begin + steps[current].count;
    if (next < limit) keys.locate(next, end_of_step(next, limit), steps[1 - current]);
    const Step<T>& following = steps[next < limit ? 1 - current : current];
    if (begin == next_window) {
      next_window += window.num_keys();
      const int64_t first = next_window + window.num_keys(), last = first + window.num_keys();
      has_window = first < limit;
      if (has_window) window.locate(keys, first, last < limit ? last : limit);
    }
    body(begin, steps[current], following, has_window ? &window : nullptr);
    begin = next;
  }
}

}  // namespace
}  // namespace tree_attention::cpu
