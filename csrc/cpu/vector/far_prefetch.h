// SPDX-License-Identifier: BSD-3-Clause
//
// Keys and values well ahead, fetched between the products of many rows.
#pragma once

#include <cstdint>

#include "cpu/vector/keys.h"

namespace tree_attention::cpu {
namespace {

// Fetches the keys and values of some steps into the second-level cache, a line of each at a time:
// a core keeps only 16 lines in flight, and drops what exceeds them.
template <typename T>
class FarPrefetch {
 public:
  // Columns of 0 leave keys or values out.
  FarPrefetch(int64_t k_columns, int64_t v_columns)
      : k_bytes_(k_columns * sizeof(T)), v_bytes_(v_columns * sizeof(T)) {}

  // The next keys and values to fetch are in `steps`.
  void begin(const Step<T>* steps, int num_steps) {
    steps_ = steps;
    num_steps_ = num_steps;
    byte_ = step_ = key_ = 0;
  }

  // How many calls of fetch() the steps take.
  int64_t lines() const {
    const int64_t bytes = k_bytes_ > v_bytes_ ? k_bytes_ : v_bytes_;
    return num_steps_ * kStepKeys * ((bytes + kLineBytes - 1) / kLineBytes);
  }

  void fetch() {
    if (step_ == num_steps_) return;
    const Step<T>& step = steps_[step_];
    const auto fetch_line = [&](const T* row) {
      __builtin_prefetch(reinterpret_cast<const char*>(row) + byte_, 0, 2);
    };
    if (byte_ < k_bytes_) fetch_line(step.k[key_]);
    if (byte_ < v_bytes_) fetch_line(step.v[key_]);
    byte_ += kLineBytes;
    if (byte_ < k_bytes_ || byte_ < v_bytes_) return;
    byte_ = 0;
    if (++key_ < step.count) return;
    key_ = 0;
    ++step_;
  }

 private:
  const int64_t k_bytes_, v_bytes_;
  const Step<T>* steps_ = nullptr;
  int64_t byte_ = 0;
  int step_ = 0, key_ = 0, num_steps_ = 0;
};

// A function for the products of the keys before these steps: every third call fetches a line, so
// that fetching is spread over them.
template <typename T>
inline auto spread(FarPrefetch<T> ahead) {
  return [ahead, calls = 0u]() mutable {
    if (++calls % 3 == 0) ahead.fetch();
  };
}

}  // namespace
}  // namespace tree_attention::cpu
