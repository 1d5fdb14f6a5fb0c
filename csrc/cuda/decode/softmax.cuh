// SPDX-License-Identifier: BSD-3-Clause
//
// From products to weights: the score terms, the mask and the online softmax of one warp's rows, of
// which a thread holds two as fragments.cuh says. A weight is one fma, from the natural score to
// units of log2 below the maximum, and one ex2: the product is not rounded, and the rounding of the
// maximum is the same in all weights and in the state. Natural logarithms leave the kernel.
#pragma once

#include "scales.cuh"
#include "units.cuh"

namespace tree_attention::cuda {

constexpr float kLn2 = 0.69314718055994530942f;

// What exponents are relative to. The maximum of a row without keys is -inf, and -inf - -inf would
// be NaN; relative to 0 its weights are zero.
__device__ __forceinline__ float finite_base(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// Turns the products of the thread's two rows into scores.
template <typename Fragments>
class RowScores {
 public:
  // `keys` are those of the whole output. Rows that do not exist see every key, so that they ask
  // for no mask.
  __device__ RowScores(const LaunchParams& params, const OutputRows& rows, const Keys& keys,
                       int first_row)
      : params_(params), rows_(rows), first_row_(first_row + Fragments::first_row()) {
    const DecodeParams& p = params.decode;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      begin_[i] = 0;
      end_[i] = INT32_MAX;
      if (row(i) >= rows.count) continue;
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
    const int last_key = first_key + Fragments::kBlockKeys * kBlocks - 1;
    const bool sees_all =
        max(begin_[0], begin_[1]) <= first_key && last_key < min(end_[0], end_[1]);
    const bool hides = __any_sync(0xffffffff, !sees_all);
    if (hides) hide(s, first_key, -INFINITY);
    return hides;
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
template <typename Fragments>
struct OnlineSoftmax {
  // The largest of the row's scores in the warp, in units of log2, or ScaledScore's base.
  float maximum[2];
  float sum[2];  // of the weights in this thread

  __device__ void clear() {
    for (int i = 0; i < 2; ++i) {
      maximum[i] = -INFINITY;
      sum[i] = 0.0f;
    }
  }

  // Turns scores into weights relative to the new maximum. A NaN score becomes a NaN weight: fmaxf
  // drops it from the maximum, but the sum keeps it.
  template <int kBlocks, typename Tile>
  __device__ void update(float (&s)[kBlocks][4], Tile& tile) {
    float larger[2];
    find_maxima(larger, s, [](float score, int, int) { return score; });
    raise({kLog2E * larger[0], kLog2E * larger[1]}, tile);
    weigh(s);
  }

  // The same relative to the largest product of a weight and the scale of its value.
  template <int kBlocks, typename Tile>
  __device__ void update(float (&s)[kBlocks][4], Tile& tile,
                         const StepScales<Fragments, kBlocks>& scales) {
    float larger[2];
    find_maxima(larger, s, [&](float score, int n, int c) {
      return ScaledScore(scales.of_key[n][Fragments::key_of(c)]).of(score);
    });
    raise({ScaledScore::base(larger[0]), ScaledScore::base(larger[1])}, tile);
    weigh(s);
  }

 private:
  // Finds the largest what(score, n, c) of the scores s[n][c] of each row.
  template <int kBlocks, typename Function>
  static __device__ void find_maxima(float (&largest)[2], const float (&s)[kBlocks][4],
                                     Function what) {
    largest[0] = largest[1] = -INFINITY;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float& of_row = largest[Fragments::row_of(c)];
        of_row = fmaxf(of_row, what(s[n][c], n, c));
      }
    }
    const auto larger_of = [](float a, float b) { return fmaxf(a, b); };
    for (float& of_row : largest) of_row = Fragments::combine_row(of_row, larger_of);
  }

  // Raises the maxima to at least `least`.
  template <typename Tile>
  __device__ void raise(const float (&least)[2], Tile& tile) {
    if (__any_sync(0xffffffff, least[0] > maximum[0] || least[1] > maximum[1])) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float larger = fmaxf(maximum[i], least[i]);
        factor[i] = ex2(maximum[i] - finite_base(larger));
        maximum[i] = larger;
        sum[i] *= factor[i];
      }
      tile.rescale(factor);
    }
  }

  template <int kBlocks>
  __device__ void weigh(float (&s)[kBlocks][4]) {
    const float base[2] = {finite_base(maximum[0]), finite_base(maximum[1])};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = Fragments::row_of(c);
        s[n][c] = ex2(fmaf(s[n][c], kLog2E, -base[row]));
        sum[row] += s[n][c];
      }
    }
  }
};

}  // namespace tree_attention::cuda
