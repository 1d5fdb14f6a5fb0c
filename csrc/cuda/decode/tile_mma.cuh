// SPDX-License-Identifier: BSD-3-Clause
//
// One warp's products of 16 packed rows with a tile of 16-bit keys and values on tensor cores. The
// scores, which are the accumulators of one mma, become the operand of the next without leaving
// their registers.
#pragma once

#include <type_traits>

#include "warp_tile.cuh"

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

// Weights, which are at most one, as operands.
template <typename Element>
struct WeightsOf16Bits {
  // They and with them o are scaled by this: float16 has no number between 0 and 2^-24.
  static constexpr float kScale = std::is_same_v<Element, Float16> ? 0x1p14f : 1.0f;
  static constexpr float kOutputScale = 1.0f / kScale;

  static __device__ uint32_t pack(float low, float high) {
    return cuda::pack<Element>(low * kScale, high * kScale);
  }
};

template <typename Config, typename Element>
class TileMma : public WarpTile<Config, TileMma<Config, Element>> {
  using Weights = WeightsOf16Bits<Element>;

 public:
  // A step must not hold more scores than fit into the registers that o leaves: with 64 rows of
  // latents o takes 128, and steps of 32 keys would spill.
  static constexpr int kMaxStepKeys = Config::kWarpColumns > 128 ? 16 : 32;

  // s [16, 8 kBlocks] = q [16, columns] k [8 kBlocks, columns]^T for the columns that the warp
  // multiplies, k from row `first_key` of the tile on.
  template <int kBlocks>
  __device__ void score_block(float (&s)[kBlocks][4], const char* tile, int first_key) const {
    const int lane = threadIdx.x % 32;
    const int row = first_key + lane / 16 * 8 + lane % 8;
    const int chunk = this->first_chunk() + lane / 8 % 2;
    const uint32_t first = shared_address(tile + Rows::offset(row, chunk));
    this->clear(s);
#pragma unroll
    for (int i = 0; i < Config::kWarpPieces; ++i) {
      uint32_t q[4];
      this->get_query(q, i);
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        uint32_t k[4];
        ldmatrix_x4(k, Rows::moved(first, 8 * n, kChunkStep * i));
        mma<Element>(s[n], q, k[0], k[1]);
        mma<Element>(s[n + 1], q, k[2], k[3]);
      }
    }
  }

  // o [16, kColumns] += p [16, 8 kBlocks] v [8 kBlocks, kColumns], with the weights p in the place
  // of s and v from row `first_key` of the tile on.
  template <int kBlocks>
  __device__ void value_block(const float (&p)[kBlocks][4], const char* tile, int first_key) {
    const int lane = threadIdx.x % 32;
    const uint32_t first = shared_address(tile + Rows::offset(first_key + lane % 16, lane / 16));
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      const uint32_t a[4] = {Weights::pack(p[n][0], p[n][1]), Weights::pack(p[n][2], p[n][3]),
                             Weights::pack(p[n + 1][0], p[n + 1][1]),
                             Weights::pack(p[n + 1][2], p[n + 1][3])};
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, Rows::moved(first, 8 * n, 2 * i));
        mma<Element>(o_[2 * i], a, v[0], v[1]);
        mma<Element>(o_[2 * i + 1], a, v[2], v[3]);
      }
    }
  }

  static constexpr float kOutputScale = Weights::kOutputScale;
  static constexpr int kParts = 4;
  static __device__ int column_of_part(int i) { return 8 * i + threadIdx.x % 4 * 2; }

  __device__ Float2 part(int first, int i, int row) const {
    const float* o = o_[first / 8 + i] + 2 * row;
    return {o[0], o[1]};
  }

 private:
  using Base = WarpTile<Config, TileMma>;
  friend Base;
  using Base::kChunkStep, Base::kColumns, Base::o_;
  using Rows = typename Config::CachedRows;

  __device__ void load_query(uint32_t (&q)[4], int i) const {
    using QueryRows = typename Config::QueryRows;
    const int lane = threadIdx.x % 32, row = this->first_row_ + lane % 16;
    if constexpr (Config::kQueriesInRegisters) {
      const int chunk = this->first_chunk() + kChunkStep * i + lane / 16;
      ldmatrix_x4(q, shared_address(this->queries_ + QueryRows::offset(row, chunk)));
    } else {  // in every tile: one address for all
      const int offset = QueryRows::offset(row, this->first_chunk() + lane / 16);
      ldmatrix_x4(q, QueryRows::moved(shared_address(this->queries_ + offset), 0, kChunkStep * i));
    }
  }
};

}  // namespace tree_attention::cuda
