// SPDX-License-Identifier: BSD-3-Clause
//
// One warp's products of 16 packed rows with a tile of 16-bit keys and values on tensor cores.
// With g = lane / 4 and t = lane % 4, a thread holds rows g and g + 8 (index 0 and 1 below); scores
// s[n] = (row 0, keys 8 n + 2 t and the next; row 1, the same) are the accumulators of one mma and
// become the operand of the next without leaving their registers.
#pragma once

#include <type_traits>

#include "tile_config.cuh"

namespace tree_attention::cuda {

// d [16, 8] += a [16, 16] b [16, 8].
template <typename Element>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    mma_m16n8k16_bf16(d, a, b0, b1);
  } else {
    mma_m16n8k16_f16(d, a, b0, b1);
  }
}

template <typename Config, typename Element>
class TileMma {
 public:
  // A step must not hold more scores than registers allow beside o.
  static constexpr int kMaxStepKeys = Config::kHeadDim > 128 ? 16 : 32;

  // The queries at `queries` may be overwritten afterwards only if they are kept in registers.
  __device__ void load_queries(const char* queries, int row_group) {
    queries_ = queries;
    row_group_ = row_group;
    if constexpr (Config::kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) load_query(q_[i], i);
    }
  }

  // s [16, 8 kBlocks] = q [16, head_dim] k [8 kBlocks, head_dim]^T, k from row `first_key` of the
  // tile on.
  template <int kBlocks>
  __device__ void score_block(float (&s)[kBlocks][4], const char* tile, int first_key) const {
    const int lane = threadIdx.x % 32;
    const int row = first_key + lane / 16 * 8 + lane % 8;
    const uint32_t first = shared_address(tile + Rows::offset(row, lane / 8 % 2));
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      for (int c = 0; c < 4; ++c) s[n][c] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      uint32_t q[4];
      if constexpr (Config::kQueriesInRegisters) {
        for (int c = 0; c < 4; ++c) q[c] = q_[i][c];
      } else {
        load_query(q, i);
      }
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        uint32_t k[4];
        ldmatrix_x4(k, Rows::moved(first, 8 * n, 2 * i));
        mma<Element>(s[n], q, k[0], k[1]);
        mma<Element>(s[n + 1], q, k[2], k[3]);
      }
    }
  }

  // o [16, head_dim] += p [16, 8 kBlocks] v [8 kBlocks, head_dim], with the weights p in the place
  // of s and v from row `first_key` of the tile on.
  template <int kBlocks>
  __device__ void value_block(const float (&p)[kBlocks][4], const char* tile, int first_key) {
    const int lane = threadIdx.x % 32;
    const uint32_t first = shared_address(tile + Rows::offset(first_key + lane % 16, lane / 16));
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      const uint32_t a[4] = {pack_weights(p[n][0], p[n][1]), pack_weights(p[n][2], p[n][3]),
                             pack_weights(p[n + 1][0], p[n + 1][1]),
                             pack_weights(p[n + 1][2], p[n + 1][3])};
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, Rows::moved(first, 8 * n, 2 * i));
        mma<Element>(o_[2 * i], a, v[0], v[1]);
        mma<Element>(o_[2 * i + 1], a, v[2], v[3]);
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      for (int c = 0; c < 4; ++c) o_[n][c] = 0.0f;
    }
  }

  __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      for (int c = 0; c < 4; ++c) o_[n][c] *= factor[c / 2];
    }
  }

  // Calls store(row, column, o) for each of the thread's values in 32 columns from `begin`, a
  // constant; rows are those of the warp, columns count from `begin`.
  template <typename Store>
  __device__ __forceinline__ void for_each_value(int begin, Store store) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        store(lane / 4 + c / 2 * 8, 8 * n + lane % 4 * 2 + c % 2,
              o_[begin / 8 + n][c] * (1.0f / kWeightScale));
      }
    }
  }

 private:
  using Rows = typename Config::CachedRows;
  static constexpr int kHeadDim = Config::kHeadDim;

  // Weights, which are at most one, and with them o are scaled by this: float16 has no number
  // between 0 and 2^-24.
  static constexpr float kWeightScale = std::is_same_v<Element, Float16> ? 0x1p14f : 1.0f;

  static __device__ uint32_t pack_weights(float low, float high) {
    return pack<Element>(low * kWeightScale, high * kWeightScale);
  }

  // Loads columns 16 i to 16 i + 15 of the queries of the warp's rows.
  __device__ void load_query(uint32_t (&q)[4], int i) const {
    const int lane = threadIdx.x % 32;
    const int offset = Config::QueryRows::offset(16 * row_group_ + lane % 16, 2 * i + lane / 16);
    ldmatrix_x4(q, shared_address(queries_ + offset));
  }

  const char* queries_;
  int row_group_;
  uint32_t q_[Config::kQueriesInRegisters ? kHeadDim / 16 : 1][4];
  float o_[kHeadDim / 8][4];
};

}  // namespace tree_attention::cuda
