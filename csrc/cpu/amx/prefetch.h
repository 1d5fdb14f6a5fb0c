// SPDX-License-Identifier: BSD-3-Clause
//
// Fetching while tiles are multiplied. A core keeps only 16 lines in flight, so that it is spread.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "cpu/bf16/eight_bits.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

// Fetches lines of the window, or where there is none the keys and values of the next step, while a
// step is computed: fetched twice, they would take up places of the window's lines
// (docs/cpu_kernel.md). A core keeps only 16 lines in flight. So fetching overlaps with computing
// only if it is spread over the whole step: each part of the step says what share of its time it
// takes.
template <typename T>
class Prefetcher {
 public:
  // The relative costs of the parts of a step: of the products of a block of rows and kTilePair
  // dims, of interleaving kTilePair dims of two values, of the weights of a block of rows.
  static constexpr int kScores = 12, kValues = 16, kInterleaving = kIsScaled<T> ? 4 : 1,
                       kWeights = 48;

  // Keys are fetched, or, given next_keys, converted to there.
  Prefetcher(const DecodeParams& p, int64_t num_blocks, const Step<T>& near, Window<T>* window,
             BFloat16* next_keys)
      : near_(near),
        window_(window),
        next_keys_(next_keys),
        k_end_(p.head_dim),
        v_end_(p.head_dim_v) {
    const int k_pairs = p.head_dim / kTilePair, v_pairs = p.head_dim_v / kTilePair;
    const int64_t longest = k_end_ > v_end_ ? k_end_ : v_end_;
    units_ = kStepKeys / kUnitKeys * static_cast<int>((longest + kLine - 1) / kLine);
    cost_ = static_cast<int>(num_blocks) * (kScores * k_pairs + kValues * v_pairs + kWeights) +
            kTileRows * kInterleaving * v_pairs;
  }

  // Fetches the share of all lines that `cost` is of the step's.
  void fetch(int cost) {
    for (due_ += cost * units_; due_ >= cost_; due_ -= cost_) fetch_unit();
  }

  // Fetches what is left.
  void finish() {
    while (key_ < kStepKeys) fetch_unit();
  }

 private:
  static constexpr int kUnitKeys = 4, kLine = kLineBytes / sizeof(T);

  void fetch_unit() {
    if (key_ == kStepKeys) return;
    if constexpr (kIsScaled<T>) {
      const int64_t end = d_ + kLine < k_end_ ? d_ + kLine : k_end_;
      if (next_keys_ != nullptr) {
        convert_keys(near_, key_, key_ + kUnitKeys, d_, end, k_end_, next_keys_);
      }
    }
    if (window_ != nullptr) {
      window_->fetch();
    } else {
      for (int i = 0; i < kUnitKeys; ++i) {
        if (next_keys_ == nullptr && d_ < k_end_) __builtin_prefetch(near_.k[key_ + i] + d_);
        if (d_ < v_end_) __builtin_prefetch(near_.v[key_ + i] + d_);
      }
    }
    d_ += kLine;
    if (d_ < k_end_ || d_ < v_end_) return;
    d_ = 0;
    key_ += kUnitKeys;
  }

  const Step<T>& near_;
  Window<T>* const window_;
  BFloat16* const next_keys_;
  const int64_t k_end_, v_end_;
  int64_t d_ = 0;
  int units_, cost_, due_ = 0, key_ = 0;
};

// As in latent attention.
template <typename T>
inline bool values_are_in_keys(const DecodeParams& p) {
  const int64_t offset = static_cast<const T*>(p.v) - static_cast<const T*>(p.k);
  return 0 <= offset && offset + p.head_dim_v <= p.head_dim && p.k_stride[0] == p.v_stride[0] &&
         p.k_stride[1] == p.v_stride[1] && p.k_stride[2] == p.v_stride[2];
}

}  // namespace
}  // namespace tree_attention::cpu
