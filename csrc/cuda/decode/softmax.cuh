// SPDX-License-Identifier: BSD-3-Clause
//
// From products to weights: the score terms, the mask and the online softmax of one warp's rows, of
// which a thread holds two as fragments.cuh says. Scores and their maximum are natural logarithms.
// A weight is ex2((s - m) log2(e)): the difference to the maximum is exact where it is small, so
// that the largest weight is exactly one at any size of scores.
#pragma once

#include <limits>

#include "scales.cuh"
#include "units.cuh"

namespace tree_attention::cuda {

constexpr float kLog2E = 1.44269504088896340736f;

// The maximum of no scores: finite, so that weights relative to it are zero and not NaN.
constexpr float kNoMaximum = std::numeric_limits<float>::lowest();

// Turns the products of the thread's two rows into scores.
template <typename Fragments>
class RowScores {
 public:
  // `keys` are the keys of the whole output. Rows that do not exist see every key, so that they ask
  // for no mask, as do all where nothing `may_hide`.
  __device__ RowScores(const LaunchParams& params, const OutputRows& rows, const Keys& keys,
                       int first_row, bool may_hide = true)
      : params_(params), rows_(rows), first_row_(first_row + Fragments::first_row()) {
    const DecodeParams& p = params.decode;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      begin_[i] = 0;
      end_[i] = INT32_MAX;
      if (!may_hide || row(i) >= rows.count) continue;
      begin_[i] = keys.begin;
      end_[i] = keys.end;
      if (p.seqlen_q > 1) {
        const int token = place_of_row(params, rows, row(i)).token;
        const auto seen = key_range<int>(p, rows.batch, token);
        begin_[i] = seen.begin;
        end_[i] = seen.end;
      }
    }
  }

  // Turns the products of `tile` with the keys from `first_key` on into scores. A score is -inf
  // where its row does not see the key. Returns whether there is such a row in the warp.
  template <int kBlocks, typename Tile>
  __device__ bool apply(float (&s)[kBlocks][4], int first_key, const Tile& tile) const {
    find_scores(s, first_key, tile);
    const int last_key = first_key + Fragments::kBlockKeys * kBlocks - 1;
    const bool sees_all =
        max(begin_[0], begin_[1]) <= first_key && last_key < min(end_[0], end_[1]);
    const bool hides = __any_sync(0xffffffff, !sees_all);
    if (hides) hide(s, first_key, -INFINITY);
    return hides;
  }

  // The same of keys that rows see.
  template <int kBlocks, typename Tile>
  __device__ void find_scores(float (&s)[kBlocks][4], int first_key, const Tile& tile) const {
    const DecodeParams& p = params_.decode;
    const float scale[2] = {p.softmax_scale * tile.product_unit(0),
                            p.softmax_scale * tile.product_unit(1)};
    const int key = first_key + Fragments::first_key();
    if (p.softcap == 0.0f) {
      for_each(s, [&](float x, int row, int) { return x * scale[row]; });
    } else {
      const float inner[2] = {scale[0] / p.softcap, scale[1] / p.softcap}, outer = p.softcap;
      for_each(s, [&](float x, int row, int) { return outer * tanhf(x * inner[row]); });
    }
    if (p.alibi_slopes != nullptr) add_alibi(s, key);
  }

  // Puts `nothing` where a row does not see the key.
  template <int kBlocks>
  __device__ void hide(float (&s)[kBlocks][4], int first_key, float nothing) const {
    const int key = first_key + Fragments::first_key();
    for_each(s, [&](float x, int row, int further) {
      const bool seen = begin_[row] <= key + further && key + further < end_[row];
      return seen ? x : nothing;
    });
  }

 private:
  // Replaces each s[n][c] by function(s[n][c], row, key), with the index of its row and how far its
  // key is from the thread's first.
  template <int kBlocks, typename Function>
  static __device__ void for_each(float (&s)[kBlocks][4], Function function) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int further = Fragments::kBlockKeys * n + Fragments::kKeyStep * Fragments::key_of(c);
        s[n][c] = function(s[n][c], Fragments::row_of(c), further);
      }
    }
  }

  __device__ int row(int i) const { return first_row_ + Fragments::kRowStep * i; }

  template <int kBlocks>
  __device__ void add_alibi(float (&s)[kBlocks][4], int key) const {
    const DecodeParams& p = params_.decode;
    float slope[2] = {0.0f, 0.0f};
    int64_t position[2] = {0, 0};
    for (int i = 0; i < 2; ++i) {
      if (row(i) >= rows_.count) continue;
      const auto [token, head] = place_of_row(params_, rows_, row(i));
      slope[i] = p.alibi_slopes[head];
      position[i] = query_position(p, rows_.batch, token);
    }
    for_each(s, [&](float x, int row, int further) {
      const int64_t distance = position[row] - position_of_key(key + further);
      return fmaf(-slope[row], static_cast<float>(distance), x);
    });
  }

  // This is key_position of rows.h without its divisions.
  __device__ int64_t position_of_key(int key) const {
    const KeyLayout& layout = params_.decode.key_layout;
    const int64_t block = params_.key_block.quotient(key);
    return layout.first + block * (layout.stride - layout.block) + key;
  }

  const LaunchParams& params_;
  const OutputRows& rows_;
  int first_row_;          // the first of the thread's two rows
  int begin_[2], end_[2];  // the keys that each row sees
};

// The unnormalised state of the thread's two rows over the keys so far, without o, which the tile
// has.
template <typename Config>
struct OnlineSoftmax {
  using Fragments = typename Config::Fragments;

  float maximum[2];  // the largest of the row's scores in the warp
  float sum[2];      // of the weights in this thread
  float lost[2];     // what rounding has added to the sum (Kahan): a block may add 10^5 weights
  float shift[2];    // o is multiplied by 2^shift: zero but for values of 8 bits

  __device__ void clear() {
    for (int i = 0; i < 2; ++i) {
      maximum[i] = kNoMaximum;
      sum[i] = lost[i] = shift[i] = 0.0f;
    }
  }

  // Turns scores into weights relative to the new maximum. A NaN score becomes a NaN weight: fmaxf
  // drops it from the maximum, but the sum keeps it.
  template <int kBlocks, typename Tile>
  __device__ void update(float (&s)[kBlocks][4], Tile& tile) {
    float larger[2];
    find_maxima(larger, s, [](float score) { return score; });
    for (float& of_row : larger) of_row = largest_of_row(of_row);
    if (__any_sync(0xffffffff, larger[0] > maximum[0] || larger[1] > maximum[1])) {
      raise(larger, tile);
    }
    float added[2];  // begins with the first weight: a zero to add it to would be an instruction
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = Fragments::row_of(c);
        s[n][c] = ex2((s[n][c] - maximum[row]) * kLog2E);
        const bool is_first = n == 0 && Fragments::key_of(c) == 0;
        added[row] = is_first ? s[n][c] : added[row] + s[n][c];
      }
    }
    for (int i = 0; i < 2; ++i) {
      const float x = added[i] - lost[i], larger_sum = sum[i] + x;
      lost[i] = larger_sum - sum[i] - x;
      sum[i] = larger_sum;
    }
  }

  // Multiplies products of weights and the scales of values, which have any magnitude, by 2^shift.
  // They become float16, which has no number between 0 and 2^-24, and none beyond 65504: the
  // largest of a row so far is 2^13 to 2^15, unless it is below 2^-80.
  template <int kBlocks, typename Tile>
  __device__ void fit(float (&products)[kBlocks][4], Tile& tile) {
    float largest[2];
    find_maxima(largest, products, [](float product) { return fabsf(product); });
    const auto is_too_large = [&](int i) { return largest[i] * ex2(shift[i]) > 0x1p15f; };
    if (__any_sync(0xffffffff, is_too_large(0) || is_too_large(1))) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float fitting = 14.0f - lg2(largest_of_row(largest[i]));
        const float least = fminf(shift[i], fmaxf(fitting, kLeastShift));
        factor[i] = ex2(least - shift[i]);
        shift[i] = least;
      }
      tile.rescale(factor);
    }
    const float factor[2] = {ex2(shift[0]), ex2(shift[1])};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) products[n][c] *= factor[Fragments::row_of(c)];
    }
  }

 private:
  static constexpr float kLeastShift = 14.0f - 128.0f, kMostShift = 14.0f + 80.0f;

  // Finds the largest what(s[n][c]) that the thread has of each row.
  template <int kBlocks, typename Function>
  static __device__ void find_maxima(float (&largest)[2], const float (&s)[kBlocks][4],
                                     Function what) {
    largest[0] = largest[1] = -INFINITY;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float& of_row = largest[Fragments::row_of(c)];
        of_row = fmaxf(of_row, what(s[n][c]));
      }
    }
  }

  static __device__ float largest_of_row(float x) {
    return Fragments::combine_row(x, [](float a, float b) { return fmaxf(a, b); });
  }

  // Raises the maxima to at least `least`.
  template <typename Tile>
  __device__ void raise(const float (&least)[2], Tile& tile) {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float larger = fmaxf(maximum[i], least[i]);
      const float growth = (larger - maximum[i]) * kLog2E;
      maximum[i] = larger;
      factor[i] = ex2(-growth);
      // Without this: sums stay relative to an older maximum.
      sum[i] *= factor[i];
      lost[i] *= factor[i];
      if constexpr (Config::kHasScales) {
        // As far as it can, o remains relative to the largest product.
        const float kept = fminf(growth, kMostShift - shift[i]);
        // Without this: units stay relative to an older maximum.
        shift[i] += kept;
        factor[i] = ex2(kept - growth);
      }
    }
    tile.rescale(factor);
  }
};

}  // namespace tree_attention::cuda
