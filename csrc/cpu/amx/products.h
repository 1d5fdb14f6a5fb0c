// SPDX-License-Identifier: BSD-3-Clause
//
// Operands, products and weights of many rows in AMX tiles. Packed keys meet kBlockRows rows at a
// time.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/amx/tiles.h"
#include "cpu/bf16/column_softmax.h"
#include "cpu/bf16/eight_bits.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/row_state.h"

namespace tree_attention::cpu {
namespace {

constexpr int kPlaces = 2;  // of packed keys: those whose scores and those whose values are in use
constexpr int kBlockRows = 2 * kTileRows;                 // rows that meet them at a time
constexpr int kTileWords = kTileRows * kTileRows;         // 32-bit words of a tile
constexpr int kGroupKeys = 8;                             // keys weighed between tile products
constexpr int kScoreWords = 2 * kPackedKeys * kTileRows;  // of a block of rows

constexpr int kFewestManyRows = 64;  // with fewer, packing keys costs more than it saves

// Memory of one call.
struct ManyRowsMemory {
  uint32_t* q;  // [row tiles, head_dim / 32, 16 pairs of dims, 16 rows]
  BFloat16* k;  // [kPlaces, kPackedKeys, head_dim]: those that are not used where they lie
  uint32_t* v;  // [kPlaces, head_dim_v / 32, steps, 2 tiles of 16 dims, 16 pairs of keys]
  float *k_scale, *v_scale;  // [kPlaces, kPackedKeys], of keys of 8 bits
  float* scores;             // [3, 2 row tiles, kPackedKeys, 16 rows]: of three blocks of rows
  float* acc;    // [row tiles, head_dim_v / 16, 16 dims, 16 rows], of the keys since the last flush
  float* total;  // likewise, of the keys before it
  double* sum;   // [rows], of all weights
  float* base;   // [rows], an integer: weights are 2^(score - base)
  float* total_base;     // [rows], base at the last flush
  int32_t *begin, *end;  // [rows], the keys that a row sees, counted from the first one of the call

  static bool suits(const DecodeParams& p) {
    return p.dtype == DataType::kBFloat16 && p.head_dim % kTilePair == 0 &&
           p.head_dim_v % kTilePair == 0 && int64_t{p.group_size()} * p.seqlen_q >= kFewestManyRows;
  }
  static int64_t padded_rows(int64_t num_rows) {
    return (num_rows + kBlockRows - 1) / kBlockRows * kBlockRows;
  }
  static size_t bytes(const DecodeParams& p, int64_t num_rows) {
    return padded_rows(num_rows) * (p.head_dim * 2 + p.head_dim_v * 8 + 24) +
           kPlaces * kPackedKeys * ((p.head_dim + p.head_dim_v) * 2 + 2 * 4) + 3 * kScoreWords * 4;
  }
  ManyRowsMemory(const DecodeParams& p, int64_t num_rows, void* memory) {
    num_rows = padded_rows(num_rows);
    char* free = static_cast<char*>(memory);
    const auto take = [&]<typename T>(T*& array, int64_t size) {
      array = reinterpret_cast<T*>(free);
      free += size * sizeof(T);
    };
    take(q, num_rows * p.head_dim / 2);
    take(k, kPlaces * kPackedKeys * p.head_dim);
    take(v, kPlaces * kPackedKeys * p.head_dim_v / 2);
    take(k_scale, kPlaces * kPackedKeys);
    take(v_scale, kPlaces * kPackedKeys);
    take(scores, 3 * kScoreWords);
    take(acc, num_rows * p.head_dim_v);
    take(total, num_rows * p.head_dim_v);
    take(sum, num_rows);
    take(base, num_rows);
    take(total_base, num_rows);
    take(begin, num_rows);
    take(end, num_rows);
  }
};

// Queries as ManyRowsMemory::q, paired as keys of type T are; those past the last row are zeros.
template <typename T>
inline void pack_query_tiles(const DecodeParams& p, const Rows& rows, int64_t num_rows,
                             uint32_t* out) {
  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    const BFloat16* sources[kTileRows];
    for (int i = 0; i < kTileRows; ++i) {
      sources[i] = first + i < rows.count ? query_of_row<BFloat16>(p, rows, first + i) : nullptr;
    }
    for (int64_t d = 0; d < p.head_dim; d += kTilePair, out += kTileWords) {
      __m512i pairs[kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        pairs[i] = sources[i] == nullptr ? __m512i{} : _mm512_loadu_si512(sources[i] + d);
        if constexpr (kIsScaled<T>) pairs[i] = interleave_halves(pairs[i]);
      }
      transpose(pairs);
      for (int i = 0; i < kTileRows; ++i) _mm512_store_si512(out + i * kTileRows, pairs[i]);
    }
  }
}

// 32 dims of values as two tiles of ManyRowsMemory::v; those past the end of the step are zeros.
template <typename T>
inline void pack_values(const Step<T>& step, int64_t d, uint32_t* tiles) {
  [[maybe_unused]] const __m512i low_half = _mm512_set1_epi32(0xffff);
  [[maybe_unused]] alignas(64) static constexpr T zeros[kTilePair] = {};
  __m512i even[kTileRows], odd[kTileRows];
  for (int i = 0; i < kTileRows; ++i) {
    const bool has_first = 2 * i < step.count, has_second = 2 * i + 1 < step.count;
    if constexpr (kIsScaled<T>) {  // the first and the last 16 dims
      pair_rows(has_first ? step.v[2 * i] + d : zeros, has_second ? step.v[2 * i + 1] + d : zeros,
                even[i], odd[i]);
    } else {
      const __m512i a = has_first ? _mm512_loadu_si512(step.v[2 * i] + d) : __m512i{};
      const __m512i b = has_second ? _mm512_loadu_si512(step.v[2 * i + 1] + d) : __m512i{};
      // (low_half & x) | (~low_half & y)
      even[i] = _mm512_ternarylogic_epi32(low_half, a, _mm512_slli_epi32(b, 16), 0xca);
      odd[i] = _mm512_ternarylogic_epi32(low_half, _mm512_srli_epi32(a, 16), b, 0xca);
    }
  }
  transpose(even);
  transpose(odd);
  for (int i = 0; i < kTileRows; ++i) {
    _mm512_store_si512(tiles + i * kTileRows, even[i]);
    _mm512_store_si512(tiles + kTileWords + i * kTileRows, odd[i]);
  }
}

// Fetches keys and values into the second-level cache, some cache lines at a time: a core keeps
// only 16 lines in flight, and drops what exceeds them.
template <typename T>
class FarPrefetcher {
 public:
  FarPrefetcher(const DecodeParams& p)
      : v_lines_(values_are_in_keys(p) ? 0 : (p.head_dim_v + kLine - 1) / kLine) {}

  // The next keys to fetch are those of `steps`.
  void begin(const Step<T>* steps, int num_steps) {
    steps_ = steps;
    num_steps_ = num_steps;
    line_ = step_ = key_ = 0;
  }

  int64_t lines() const { return num_steps_ * kStepKeys * v_lines_; }

  void fetch(int64_t lines) {
    for (; lines > 0 && step_ < num_steps_; --lines) {
      const Step<T>& step = steps_[step_];
      __builtin_prefetch(step.v[key_] + line_ * kLine, 0, 2);
      if (++line_ < v_lines_) continue;
      line_ = 0;
      if (++key_ < step.count) continue;
      key_ = 0;
      ++step_;
    }
  }

 private:
  static constexpr int64_t kLine = kLineBytes / sizeof(T);

  // As in latent attention.
  static bool values_are_in_keys(const DecodeParams& p) {
    const int64_t offset = static_cast<const T*>(p.v) - static_cast<const T*>(p.k);
    return 0 <= offset && offset + p.head_dim_v <= p.head_dim && p.k_stride[0] == p.v_stride[0] &&
           p.k_stride[1] == p.v_stride[1] && p.k_stride[2] == p.v_stride[2];
  }

  const int64_t v_lines_;
  const Step<T>* steps_ = nullptr;
  int64_t line_ = 0;
  int step_ = 0, key_ = 0, num_steps_ = 0;
};

// 16 keys as a matrix.
struct KeyTile {
  const BFloat16* rows;
  int64_t stride;  // in bytes
};

struct TileMeeting : Meeting {
  const KeyTile* k;
  const uint32_t* v;
  const float *k_scale, *v_scale;  // of the packed keys
  float* scores;
  int located_steps;  // of the packed keys, in the first meeting with them; else 0
};

// Four tile products, which is what the matrix unit is given between two beats: calls of beat(), in
// which the vector units have work of their own.
inline void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

template <typename Beat>
inline void score_products(const DecodeParams& p, const ManyRowsMemory& m,
                           const TileMeeting& meeting, const Beat& beat) {
  const uint32_t* block = m.q + meeting.row * p.head_dim / 2;
  for (int step = meeting.first_step; step < meeting.last_step; ++step) {
    const KeyTile first = meeting.k[2 * step], second = meeting.k[2 * step + 1];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < p.head_dim; d += kTilePair) {
      const uint32_t* q = block + d * kTileRows / 2;
      _tile_loadd(4, first.rows + d, first.stride);
      _tile_loadd(5, second.rows + d, second.stride);
      _tile_loadd(6, q, 64);
      _tile_loadd(7, q + p.head_dim * kTileRows / 2, 64);
      multiply_tiles();
      beat();
    }
    float* scores = meeting.scores + step * kStepKeys * kTileRows;
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + kPackedKeys * kTileRows, 64);
    _tile_stored(2, scores + kTileWords, 64);
    _tile_stored(3, scores + kPackedKeys * kTileRows + kTileWords, 64);
  }
}

template <typename Beat>
inline void value_products(const DecodeParams& p, const ManyRowsMemory& m,
                           const TileMeeting& meeting, const Beat& beat) {
  const int64_t block = p.head_dim_v * kTileRows;  // of acc
  for (int64_t d = 0; d < p.head_dim_v; d += kTilePair) {
    float* acc = m.acc + meeting.row * p.head_dim_v + d * kTileRows;
    _tile_loadd(0, acc, 64);
    _tile_loadd(1, acc + block, 64);
    _tile_loadd(2, acc + kTileWords, 64);
    _tile_loadd(3, acc + block + kTileWords, 64);
    const float* next_acc = acc + 2 * kTileWords;
    for (int step = meeting.first_step; step < meeting.last_step; ++step) {
      const uint32_t* v = meeting.v + (d / kTilePair * kPackedSteps + step) * 2 * kTileWords;
      const float* weights = meeting.scores + step * kStepKeys * kTileRows;
      constexpr int kLines = 2 * kTileRows / kPackedSteps;
      for (int i = 0; i < kLines; ++i, next_acc += kLineBytes / sizeof(float)) {
        __builtin_prefetch(next_acc);
        __builtin_prefetch(next_acc + block);
      }
      // Used once, they leave no trace in the first-level cache, which has room for the weights.
      _tile_stream_loadd(4, v, 64);
      _tile_stream_loadd(5, v + kTileWords, 64);
      for (int term = 0; term < 2; ++term, weights += kTileRows) {
        _tile_loadd(6, weights, 128);
        _tile_loadd(7, weights + kPackedKeys * kTileRows, 128);
        multiply_tiles();
        beat();
      }
    }
    _tile_stored(0, acc, 64);
    _tile_stored(1, acc + block, 64);
    _tile_stored(2, acc + kTileWords, 64);
    _tile_stored(3, acc + block + kTileWords, 64);
  }
}

// The beats of the products of a meeting's scores, and of its values.
inline int64_t score_beats(const DecodeParams& p, const TileMeeting& meeting) {
  return meeting.num_steps() * (p.head_dim / kTilePair);
}
inline int64_t value_beats(const DecodeParams& p, const TileMeeting& meeting) {
  return int64_t{2} * meeting.num_steps() * (p.head_dim_v / kTilePair);
}

}  // namespace
}  // namespace tree_attention::cpu
