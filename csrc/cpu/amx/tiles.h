// SPDX-License-Identifier: BSD-3-Clause
//
// AMX tiles, and the memory of a call that they are loaded from. Few rows multiply K Q^T and P V,
// so that V is taken in rows as it comes; many rows multiply K Q^T and V^T P^T, whose lanes are
// rows throughout, so that V is transposed, once for all of them. Queries and keys are laid out
// alike.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "cpu/bf16/column_softmax.h"
#include "cpu/bf16/eight_bits.h"
#include "cpu/vector/arrays.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/row_state.h"

namespace tree_attention::cpu {
namespace {

constexpr int kTileWords = kTileRows * kTileRows;  // 32-bit words of a tile

// The tiles of few rows: 0, 1 scores^T; 2 keys or values; 3 queries^T; 4, 5 o; 6, 7 the two terms
// of P. A block of few rows has smaller tiles: loads and stores cost by the row.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  // `columns` of scores^T, of 4 bytes each.
  TileConfig(int num_rows, int columns) {
    for (int tile = 0; tile < 4; ++tile) shape(tile, kTileRows, tile == 2 ? 64 : 4 * columns);
    for (int tile = 4; tile < 8; ++tile) shape(tile, num_rows, 64);
  }

 private:
  void shape(int tile, int num_rows, int num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    bytes_per_row[tile] = static_cast<uint16_t>(num_bytes);
  }
};

// The tile intrinsics do not tell the compiler that they read memory.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// 16 keys as a matrix.
struct KeyTile {
  const char* rows;
  int64_t stride;  // in bytes

  template <typename T>
  static KeyTile at(const T* rows, int64_t stride) {
    return {reinterpret_cast<const char*>(rows), stride * static_cast<int64_t>(sizeof(T))};
  }
};

// The 16 keys from `first` on: in place if they lie at equal distances, else copied.
template <typename T>
inline KeyTile key_tile(const DecodeParams& p, const Step<T>& step, int first, T* copy) {
  if (step.count >= first + kTileRows) {
    const int64_t stride = step.k[first + 1] - step.k[first];
    bool regular = true;
    for (int i = first + 2; i < first + kTileRows; ++i) {
      regular &= step.k[i] - step.k[i - 1] == stride;
    }
    if (regular) return KeyTile::at(step.k[first], stride);
  }
  const int64_t stride = p.head_dim;
  for (int i = 0; i < kTileRows; ++i) {
    __builtin_memcpy(copy + i * stride, step.k[first + i < step.count ? first + i : step.count - 1],
                     stride * sizeof(T));
  }
  return KeyTile::at(copy, stride);
}

// The keys of a step as two matrices. `copy` [32, head_dim] has the keys that cannot be used in
// place, or all keys if they were converted.
template <bool kConverted, typename T>
inline void key_tiles(const DecodeParams& p, const Step<T>& step, BFloat16* copy, KeyTile* tiles) {
  if constexpr (kConverted) {
    tiles[0] = KeyTile::at(copy, p.head_dim);
    tiles[1] = KeyTile::at(copy + kTileRows * p.head_dim, p.head_dim);
  } else {
    T* own = reinterpret_cast<T*>(copy);
    tiles[0] = key_tile(p, step, 0, own);
    tiles[1] = key_tile(p, step, kTileRows, own + kTileRows * p.head_dim);
  }
}

struct FewRowsMemory {
  uint32_t* q;           // [row blocks, head_dim / 32, 16 pairs of dims, columns], or digits
  BFloat16* k;           // [buffers, 32 keys, head_dim]: copies, if keys cannot be read in place
  uint32_t* v;           // [head_dim_v / 32, 2 tiles of 16 dims, 16 pairs of keys, 16 dims]
  float* scores;         // [2, 32 keys, columns]
  int32_t* products;     // [32 keys, 2 groups of rows, 16]: of digits, for keys of int8
  uint16_t *high, *low;  // [16 rows, 32 keys]: the two terms of P
  size_t num_bytes;

  static int64_t row_blocks(int64_t num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }

  FewRowsMemory(const DecodeParams& p, int64_t num_rows, void* memory) {
    Arrays arrays(memory);
    // Keys of 8 bits are converted while the keys of the step before are used.
    const int64_t key_buffers = p.kv_dtype == DataType::kBFloat16 ? 1 : 2;
    arrays.take(q, row_blocks(num_rows) * kTileRows * padded(p.head_dim) / 2);
    arrays.take(k, key_buffers * kStepKeys * padded(p.head_dim));
    arrays.take(v, kStepKeys * padded(p.head_dim_v) / 2);
    arrays.take(scores, 2 * kStepKeys * kTileRows);
    arrays.take(products, p.kv_dtype == DataType::kInt8 ? kStepKeys * 2 * kTileRows : 0);
    arrays.take(high, kTileRows * kStepKeys);
    arrays.take(low, kTileRows * kStepKeys);
    num_bytes = arrays.bytes();
  }
};

constexpr int kPlaces = 2;  // of packed keys: those whose scores and those whose values are in use
constexpr int kBlockRows = 2 * kTileRows;                 // rows that attend to them at a time
constexpr int kScoreWords = 2 * kPackedKeys * kTileRows;  // of a block of rows
constexpr int kFewestManyRows = 64;  // with fewer, packing keys costs more than it saves

// acc and total are [row tiles, head_dim_v / 16, 16 dims, 16 rows].
struct TileRowsMemory : RowArrays {
  uint32_t* q;  // [row tiles, head_dim / 32, 16 pairs of dims, 16 rows]
  BFloat16* k;  // [kPlaces, kPackedKeys, head_dim]: copies, if keys cannot be read in place
  uint32_t* v;  // [kPlaces, head_dim_v / 32, steps, 2 tiles of 16 dims, 16 pairs of keys]
  float *k_scale, *v_scale;  // [kPlaces, kPackedKeys], of keys of 8 bits
  float* scores;             // [3, 2 row tiles, kPackedKeys, 16 rows]: of three blocks of rows
  size_t num_bytes;

  static bool supports(const DecodeParams& p) {
    return p.dtype == DataType::kBFloat16 && p.head_dim % kTilePair == 0 &&
           p.head_dim_v % kTilePair == 0 && int64_t{p.group_size()} * p.seqlen_q >= kFewestManyRows;
  }
  static int64_t padded_rows(int64_t num_rows) {
    return (num_rows + kBlockRows - 1) / kBlockRows * kBlockRows;
  }
  static size_t bytes(const DecodeParams& p, int64_t num_rows) {
    return TileRowsMemory(p, num_rows, nullptr).num_bytes;
  }

  TileRowsMemory(const DecodeParams& p, int64_t num_rows, void* memory) {
    num_rows = padded_rows(num_rows);
    Arrays arrays(memory);
    arrays.take(q, num_rows * p.head_dim / 2);
    arrays.take(k, kPlaces * kPackedKeys * p.head_dim);
    arrays.take(v, kPlaces * kPackedKeys * p.head_dim_v / 2);
    arrays.take(k_scale, kPlaces * kPackedKeys);
    arrays.take(v_scale, kPlaces * kPackedKeys);
    arrays.take(scores, 3 * kScoreWords);
    take(arrays, num_rows, p.head_dim_v);
    num_bytes = arrays.bytes();
  }
};

}  // namespace
}  // namespace tree_attention::cpu
