// SPDX-License-Identifier: BSD-3-Clause
//
// Which rows and keys a thread's scores belong to. The scores of a warp are blocks of the
// accumulators of one mma.m16n8k16, four of a thread, s[n][0] to s[n][3]: of two rows, index 0 and
// 1, and of two keys. With g = lane / 4 and t = lane % 4 accumulators 0 and 1 are (g, 2 t) and the
// right neighbour, 2 and 3 the same of line g + 8.
#pragma once

#include "cuda/element.cuh"

namespace tree_attention::cuda {

// Combines x of the lanes whose numbers differ in the bits from kFirst up to kEnd, in all of them.
template <int kFirst, int kEnd, typename Function>
__device__ __forceinline__ float combine_lanes(float x, Function function) {
#pragma unroll
  for (int bit = kFirst; bit < kEnd; bit *= 2) {
    x = function(x, __shfl_xor_sync(0xffffffff, x, bit));
  }
  return x;
}

// s = q k^T: a block is 16 rows by 8 keys.
struct RowsByKeys {
  static constexpr int kRows = 16, kBlockKeys = 8;
  static constexpr int kRowStep = 8;  // from the thread's first row to its second

  static __device__ int first_row() { return threadIdx.x % 32 / 4; }
  static __device__ int first_key() { return threadIdx.x % 4 * 2; }
  // Which of the thread's rows, and of a block's keys, accumulator c belongs to.
  static __device__ constexpr int row_of(int c) { return c / 2; }
  static __device__ constexpr int key_of(int c) { return c % 2; }
  static constexpr int kKeyStep = 1;  // from the thread's first key of a block to its second
  // What an array has for the thread's two keys of a block.
  static __device__ Float2 load(const float* of_block) {
    return load_float2(of_block + first_key());
  }

  // Combines x of the lanes that have the same rows.
  template <typename Function>
  static __device__ __forceinline__ float combine_row(float x, Function function) {
    return combine_lanes<1, 4>(x, function);
  }
  static __device__ bool is_first_of_row() { return threadIdx.x % 4 == 0; }

  // Rows that a warp stores at a time have different turns where they would share banks.
  static __device__ int turn(int row) { return row & 3; }
};

// s^T = k q^T: a block is 16 keys by 8 rows.
struct KeysByRows {
  static constexpr int kRows = 8, kBlockKeys = 16;
  static constexpr int kRowStep = 1;

  static __device__ int first_row() { return threadIdx.x % 4 * 2; }
  static __device__ int first_key() { return threadIdx.x % 32 / 4; }
  static __device__ constexpr int row_of(int c) { return c % 2; }
  static __device__ constexpr int key_of(int c) { return c / 2; }
  static constexpr int kKeyStep = 8;
  static __device__ Float2 load(const float* of_block) {
    return {of_block[first_key()], of_block[first_key() + kKeyStep]};
  }

  template <typename Function>
  static __device__ __forceinline__ float combine_row(float x, Function function) {
    return combine_lanes<4, 32>(x, function);
  }
  static __device__ bool is_first_of_row() { return threadIdx.x % 32 < 4; }

  static __device__ int turn(int row) { return row >> 1 & 3; }
};

}  // namespace tree_attention::cuda
