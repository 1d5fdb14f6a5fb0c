// SPDX-License-Identifier: BSD-3-Clause
//
// Keys and values ahead, fetched between the products of many rows.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "cpu/vector/keys.h"

namespace tree_attention::cpu {
namespace {

// Fetches the keys and values of some steps into the second-level cache, a line of each with every
// kEvery-th call: spread over the products of the keys before them.
template <typename T>
class SpreadPrefetch {
 public:
  SpreadPrefetch(const DecodeParams& p, const Step<T>* steps, int num_steps)
      : steps_(steps),
        num_steps_(num_steps),
        k_bytes_(p.head_dim * sizeof(T)),
        v_bytes_(p.head_dim_v * sizeof(T)) {}

  void operator()() {
    if (++calls_ % kEvery != 0 || step_ == num_steps_) return;
    const Step<T>& step = steps_[step_];
    const auto fetch = [&](const T* row) {
      __builtin_prefetch(reinterpret_cast<const char*>(row) + byte_, 0, 2);
    };
    if (byte_ < k_bytes_) fetch(step.k[key_]);
    if (byte_ < v_bytes_) fetch(step.v[key_]);
    byte_ += kLineBytes;
    if (byte_ < k_bytes_ || byte_ < v_bytes_) return;
    byte_ = 0;
    if (++key_ < step.count) return;
    key_ = 0;
    ++step_;
  }

 private:
  static constexpr unsigned kEvery = 3;

  const Step<T>* steps_;
  const int num_steps_;
  const int64_t k_bytes_, v_bytes_;
  int64_t byte_ = 0;
  int step_ = 0, key_ = 0;
  unsigned calls_ = 0;
};

struct NoSpreadPrefetch {
  void operator()() {}
};

}  // namespace
}  // namespace tree_attention::cpu
