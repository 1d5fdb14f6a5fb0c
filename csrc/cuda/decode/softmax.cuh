// SPDX-License-Identifier: BSD-3-Clause
//
// From products to weights: the score terms, the mask and the online softmax of one warp's 16 rows.
// A thread holds two rows as warp_tile.cuh says. A weight is one fma, from the natural score to
// units of log2 below the maximum, and one ex2: the product is not rounded, and the rounding of the
// maximum is the same in all weights and in the state. Natural logarithms leave the kernel.
#pragma once

#include "units.cuh"

namespace tree_attention::cuda {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// Turns the products of the thread's two rows into scores.
class RowScores {
 public:
  // `keys` are those of the whole output. Rows that do not exist see every key, so that they ask
  // for no mask.
  __device__ RowScores(const LaunchParams& params, const OutputRows& rows, const Keys& keys,
                       int first_row)
      : params_(params), rows_(rows), first_row_(first_row + threadIdx.x % 32 / 4) {
    const DecodeParams& p = params.decode;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      begin_[i] = 0;
      end_[i] = INT32_MAX;
      if (first_row_ + 8 * i >= rows.count) continue;
      begin_[i] = keys.begin;
      end_[i] = keys.end;
      if (p.seqlen_q > 1) {
        const int token = place_of_row(params, rows, first_row_ + 8 * i).token;
        const KeyRange seen = key_range(p, rows.batch, token);
        begin_[i] = static_cast<int>(seen.begin);
        end_[i] = static_cast<int>(seen.end);
      }
    }
  }

  // Turns the products with the keys from `first_key` on into scores. A score is -inf where its row
  // does not see the key.
  template <int kBlocks>
  __device__ void apply(float (&s)[kBlocks][4], int first_key) const {
    const DecodeParams& p = params_.decode;
    const float scale = p.softmax_scale;
    const int key = first_key + threadIdx.x % 4 * 2;
    if (p.softcap == 0.0f) {
      for_each(s, [&](float x, int, int) { return x * scale; });
    } else {
      const float inner = scale / p.softcap, outer = p.softcap;
      for_each(s, [&](float x, int, int) { return outer * tanhf(x * inner); });
    }
    if (p.alibi_slopes != nullptr) add_alibi(s, key);
    hide(s, first_key, -INFINITY);
  }

  // Multiplies the products by the scales of their keys, those at `scales`.
  template <int kBlocks>
  __device__ void scale_products(float (&s)[kBlocks][4], const float* scales) const {
    if (params_.decode.k_scale != nullptr) scale_columns(s, scales);
  }

  // Multiplies the weights of the keys from `first_key` on by the scales of the values. A weight is
  // zero where its row does not see the key, whose scale may be NaN.
  template <int kBlocks>
  __device__ void scale_weights(float (&s)[kBlocks][4], const float* scales, int first_key) const {
    if (params_.decode.v_scale == nullptr) return;
    scale_columns(s, scales);
    hide(s, first_key, 0.0f);
  }

 private:
  // Puts `nothing` where a row does not see the key.
  template <int kBlocks>
  __device__ void hide(float (&s)[kBlocks][4], int first_key, float nothing) const {
    const int key = first_key + threadIdx.x % 4 * 2, last_key = first_key + 8 * kBlocks - 1;
    const bool sees_all =
        max(begin_[0], begin_[1]) <= first_key && last_key < min(end_[0], end_[1]);
    if (__any_sync(0xffffffff, !sees_all)) {
      for_each(s, [&](float x, int row, int column) {
        const bool seen = begin_[row] <= key + column && key + column < end_[row];
        return seen ? x : nothing;
      });
    }
  }

  template <int kBlocks>
  static __device__ void scale_columns(float (&s)[kBlocks][4], const float* scales) {
    float of_key[kBlocks][2];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const Float2 pair = load_float2(scales + 8 * n + threadIdx.x % 4 * 2);
      for (int c = 0; c < 2; ++c) of_key[n][c] = pair.value[c];
    }
    for_each(s, [&](float x, int, int column) { return x * of_key[column / 8][column % 2]; });
  }

  template <int kBlocks, typename Function>
  static __device__ void for_each(float (&s)[kBlocks][4], Function function) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = function(s[n][c], c / 2, 8 * n + c % 2);
    }
  }

  template <int kBlocks>
  __device__ void add_alibi(float (&s)[kBlocks][4], int key) const {
    const DecodeParams& p = params_.decode;
    float slope[2] = {0.0f, 0.0f};
    int64_t position[2] = {0, 0};
    for (int i = 0; i < 2; ++i) {
      if (first_row_ + 8 * i >= rows_.count) continue;
      const auto [token, head] = place_of_row(params_, rows_, first_row_ + 8 * i);
      slope[i] = p.alibi_slopes[head];
      position[i] = query_position(p, rows_.batch, token);
    }
    for_each(s, [&](float x, int row, int column) {
      const int64_t distance = position[row] - position_of_key(key + column);
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
  int first_row_;          // the first of the thread's two rows; the second is 8 further
  int begin_[2], end_[2];  // the keys that each row sees
};

// The unnormalised state of the thread's two rows over the keys so far, without o, which the tile
// has.
struct OnlineSoftmax {
  float maximum[2];  // of all of the row's scores in the warp, in units of log2
  float sum[2];      // of the weights in this thread

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
    float larger[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) larger[c / 2] = fmaxf(larger[c / 2], s[n][c]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      larger[i] = fmaxf(larger[i], __shfl_xor_sync(0xffffffff, larger[i], 1));
      larger[i] = fmaxf(larger[i], __shfl_xor_sync(0xffffffff, larger[i], 2));
      larger[i] = fmaxf(maximum[i], kLog2E * larger[i]);
    }
    if (__any_sync(0xffffffff, larger[0] > maximum[0] || larger[1] > maximum[1])) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factor[i] = ex2(maximum[i] - finite_base(larger[i]));
        maximum[i] = larger[i];
        sum[i] *= factor[i];
      }
      tile.rescale(factor);
    }
    const float base[2] = {finite_base(maximum[0]), finite_base(maximum[1])};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[n][c] = ex2(fmaf(s[n][c], kLog2E, -base[c / 2]));
        sum[c / 2] += s[n][c];
      }
    }
  }

  // What exponents are relative to. The maximum of a row without keys is -inf, and -inf - -inf
  // would be NaN; relative to 0 its weights are zero.
  static __device__ float finite_base(float maximum) {
    return maximum == -INFINITY ? 0.0f : maximum;
  }
};

}  // namespace tree_attention::cuda
