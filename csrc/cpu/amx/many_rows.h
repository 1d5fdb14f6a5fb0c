// SPDX-License-Identifier: BSD-3-Clause
//
// Many rows in AMX tiles, for bfloat16 queries. A row that does not see every key of a block
// has those masked: their scores become -inf and their weights 0. That is wrong only where a value
// is not finite, and then the vectors compute the output again.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/amx/packing.h"
#include "cpu/amx/prefetch.h"
#include "cpu/amx/tiles.h"
#include "cpu/bf16/column_softmax.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/far_prefetch.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"

namespace tree_attention::cpu {
namespace {

struct TileKeyBlock : KeyBlock {
  const KeyTile* k;
  const uint32_t* v;
  const float *k_scale, *v_scale;  // of the packed keys
  float* scores;
  int located_steps;  // of the packed keys, for the first rows that see them; else 0
};

// Four tile products: what the matrix unit is given between two calls of next_slice(), in which the
// vector units do a slice of their own work.
inline void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

template <typename T>
class TileRowsAttention {
 public:
  TileRowsAttention(const DecodeParams& p, const Rows& rows, KeyRange range, void* workspace)
      : p_(p),
        rows_(rows),
        keys_(p, rows),
        range_(range),
        m_(p, rows.count, workspace),
        num_rows_(TileRowsMemory::padded_rows(rows.count)),
        adjusted_(p.softcap != 0.0f || p.alibi_slopes != nullptr || !(score_scale(p) > 0.0f)),
        scale_(adjusted_ ? 1.0f : score_scale(p)),
        ahead_(0, values_are_in_keys<T>(p) ? 0 : p.head_dim_v) {}

  // Whether o and lse are what they should be. Otherwise, and for what this cannot do, the vectors
  // have to compute them.
  bool run(float* o, float* lse) {
    if (!locate_ranges(p_, rows_, range_, num_rows_, m_)) return false;
    pack_queries<T>(p_, rows_, num_rows_, kTileRows, m_.q);
    for (int64_t i = 0; i < num_rows_ * p_.head_dim_v; i += kLanes) {
      store(m_.acc + i, zero());
      store(m_.total + i, zero());
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      m_.base[row] = m_.total_base[row] = kNoBase;
      m_.sum[row] = 0.0;
    }
    const TileConfig config(kTileRows, kTileRows);
    finish_stores();
    _tile_loadconfig(&config);
    attend_keys();
    _tile_release();
    for (int64_t row = 0; row < num_rows_; row += kBlockRows) flush_block(row);
    return !too_large_ && normalise_rows(o, lse);
  }

 private:
  int64_t num_keys() const { return range_.end - range_.begin; }
  static int64_t place_of(int64_t key) { return key / kPackedKeys % kPlaces; }
  Step<T>* steps_of(int64_t key) { return steps_[key / kPackedKeys % kLocated]; }

  // Finds the keys that are packed together from `key` on; returns the number of their steps.
  int locate_packed(int64_t key) {
    Step<T>* step = steps_of(key);
    const int64_t begin = range_.begin + key;
    const int64_t end = begin + kPackedKeys < range_.end ? begin + kPackedKeys : range_.end;
    for (int64_t i = begin; i < end; i += kStepKeys) keys_.locate(i, end_of_step(i, end), *step++);
    return static_cast<int>(step - steps_of(key));
  }

  // Makes matrices of located keys: where they lie, or copied or converted.
  void prepare_keys(int64_t key, int num_steps) {
    const int64_t place = place_of(key);
    const Step<T>* steps = steps_of(key);
    for (int i = 0; i < num_steps; ++i) {
      BFloat16* copy = m_.k + (place * kPackedKeys + i * kStepKeys) * p_.head_dim;
      if constexpr (kIsScaled<T>) {
        convert_keys(steps[i], 0, kStepKeys, 0, p_.head_dim, p_.head_dim, copy);
        const int64_t first = place * kPackedKeys + i * kStepKeys;
        __builtin_memcpy(m_.k_scale + first, steps[i].k_scale, sizeof(steps[i].k_scale));
        __builtin_memcpy(m_.v_scale + first, steps[i].v_scale, sizeof(steps[i].v_scale));
      }
      key_tiles<kIsScaled<T>>(p_, steps[i], copy, tiles_[place] + 2 * i);
    }
  }

  // Packs the next kTilePair dims of the next step's values.
  void pack_piece() {
    const int64_t place = place_of(packed_->key);
    pack_transposed_values(steps_of(packed_->key)[pack_step_], pack_d_,
                           m_.v + place * kPackedKeys * p_.head_dim_v / 2 +
                               (pack_d_ / kTilePair * kPackedSteps + pack_step_) * 2 * kTileWords);
    pack_d_ += kTilePair;
    if (pack_d_ < p_.head_dim_v) return;
    pack_d_ = 0;
    if (++pack_step_ == packed_->located_steps) packed_ = nullptr;
  }

  // Blocks of rows attend to the packed keys one after another. Three are under way: the scores of
  // the next one and the values of the one before are multiplied while this one's weights are
  // computed. The first one's scores have brought the keys into the second-level cache, and in
  // latent attention the values with them, which are packed then.
  void attend_keys() {
    TileKeyBlock key_blocks[3];
    const TileKeyBlock *previous = nullptr, *current = nullptr;
    int64_t count = 0;
    const int64_t num_slices =
        num_rows_ / kBlockRows * kPackedSteps * (p_.head_dim + 2 * p_.head_dim_v) / kTilePair;
    int num_steps = locate_packed(0);
    for (int64_t key = 0; key < num_keys(); key += kPackedKeys) {
      const int64_t left = num_keys() - key, place = place_of(key);
      prepare_keys(key, num_steps);
      const int located_steps = num_steps;
      num_steps = left > kPackedKeys ? locate_packed(key + kPackedKeys) : 0;
      ahead_.begin(steps_of(key + kPackedKeys), num_steps);
      lines_per_slice_ = (ahead_.lines() + num_slices - 1) / num_slices;
      bool is_first = true;
      for (int64_t row = 0; row < num_rows_; row += kBlockRows) {
        TileKeyBlock& next = key_blocks[count % 3];
        const int64_t num_packed = left < kPackedKeys ? left : kPackedKeys;
        if (!find_visible_keys(m_, row, kBlockRows, key, num_packed, next)) continue;
        next.k = tiles_[place];
        next.v = m_.v + place * kPackedKeys * p_.head_dim_v / 2;
        next.k_scale = m_.k_scale + place * kPackedKeys;
        next.v_scale = m_.v_scale + place * kPackedKeys;
        next.scores = m_.scores + count % 3 * kScoreWords;
        next.located_steps = is_first ? located_steps : 0;
        is_first = false;
        ++count;
        advance(previous, current, &next);
        previous = current;
        current = &next;
      }
    }
    advance(previous, current, nullptr);
    advance(current, nullptr, nullptr);
  }

  void advance(const TileKeyBlock* previous, const TileKeyBlock* current,
               const TileKeyBlock* next) {
    int64_t slices = (previous == nullptr ? 0 : value_slices(*previous)) +
                     (next == nullptr ? 0 : score_slices(*next));
    finish_stores();
    if (previous != nullptr) {
      const int64_t chunk = previous->key / kFlushKeys;
      int64_t& last_chunk = chunks_[previous->row / kBlockRows];
      if (chunk != last_chunk) flush_block(previous->row);
      last_chunk = chunk;
      finish_stores();
      if (current != nullptr && previous->row == current->row) {
        // its sums are about to be rescaled
        value_products(*previous, [] {});
        slices -= value_slices(*previous);
        previous = nullptr;
        finish_stores();
      }
    }
    weighed_ = current;
    pack_d_ = pack_step_ = 0;
    weighed_tile_ = 0;
    weighed_key_ = current == nullptr ? 0 : current->first_step * kStepKeys;
    cost_ = 0;
    if (current != nullptr) {
      cost_ = current->num_steps() * 2 * kStepKeys / kGroupKeys +
              current->located_steps * (p_.head_dim_v / kTilePair) * kPieceCost;
      if (current->located_steps > 0) packed_ = current;
    }
    slices_ = slices;
    budget_ = 0;
    const auto next_slice = [this] {
      for (int64_t i = 0; i < lines_per_slice_; ++i) ahead_.fetch();
      for (budget_ += cost_; budget_ >= slices_;) {
        budget_ -= work() * slices_;
      }
    };
    if (previous != nullptr) value_products(*previous, next_slice);
    if (next != nullptr) score_products(*next, next_slice);
    while (work() != kNothingLeft) {
    }
    finish_stores();
  }

  template <typename NextSlice>
  void score_products(const TileKeyBlock& key_block, const NextSlice& next_slice) const {
    const int64_t head_dim = p_.head_dim;
    const uint32_t* block = m_.q + key_block.row * head_dim / 2;
    for (int step = key_block.first_step; step < key_block.last_step; ++step) {
      const KeyTile first = key_block.k[2 * step], second = key_block.k[2 * step + 1];
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t d = 0; d < head_dim; d += kTilePair) {
        const uint32_t* q = block + d * kTileRows / 2;
        _tile_loadd(4, first.rows + d * 2, first.stride);
        _tile_loadd(5, second.rows + d * 2, second.stride);
        _tile_loadd(6, q, 64);
        _tile_loadd(7, q + head_dim * kTileRows / 2, 64);
        multiply_tiles();
        next_slice();
      }
      float* scores = key_block.scores + step * kStepKeys * kTileRows;
      _tile_stored(0, scores, 64);
      _tile_stored(1, scores + kPackedKeys * kTileRows, 64);
      _tile_stored(2, scores + kTileWords, 64);
      _tile_stored(3, scores + kPackedKeys * kTileRows + kTileWords, 64);
    }
  }

  template <typename NextSlice>
  void value_products(const TileKeyBlock& key_block, const NextSlice& next_slice) const {
    const int64_t head_dim = p_.head_dim_v;
    const int64_t block = head_dim * kTileRows;  // of acc
    for (int64_t d = 0; d < head_dim; d += kTilePair) {
      float* acc = m_.acc + key_block.row * head_dim + d * kTileRows;
      _tile_loadd(0, acc, 64);
      _tile_loadd(1, acc + block, 64);
      _tile_loadd(2, acc + kTileWords, 64);
      _tile_loadd(3, acc + block + kTileWords, 64);
      const float* next_acc = acc + 2 * kTileWords;
      for (int step = key_block.first_step; step < key_block.last_step; ++step) {
        const uint32_t* v = key_block.v + (d / kTilePair * kPackedSteps + step) * 2 * kTileWords;
        const float* weights = key_block.scores + step * kStepKeys * kTileRows;
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
          next_slice();
        }
      }
      _tile_stored(0, acc, 64);
      _tile_stored(1, acc + block, 64);
      _tile_stored(2, acc + kTileWords, 64);
      _tile_stored(3, acc + block + kTileWords, 64);
    }
  }

  // The slices in which a block's scores are multiplied, and its values.
  int64_t score_slices(const TileKeyBlock& key_block) const {
    return key_block.num_steps() * (p_.head_dim / kTilePair);
  }
  int64_t value_slices(const TileKeyBlock& key_block) const {
    return int64_t{2} * key_block.num_steps() * (p_.head_dim_v / kTilePair);
  }

  // Does the next piece of what the vector units have to do and returns its cost, more than all the
  // budget of an advance if nothing is left.
  __attribute__((noinline)) int64_t work() {
    if (weighed_ != nullptr) {
      weigh_group();
      return 1;
    }
    if (packed_ == nullptr) return kNothingLeft;
    pack_piece();
    return kPieceCost;
  }

  // Scores to weights: kGroupKeys keys of a tile of rows.
  void weigh_group() {
    const TileKeyBlock& key_block = *weighed_;
    const int first = key_block.first_step * kStepKeys, last = key_block.last_step * kStepKeys;
    const int64_t row = key_block.row + weighed_tile_ * kTileRows;
    float* scores = key_block.scores + weighed_tile_ * kPackedKeys * kTileRows;
    if (weighed_key_ == first) {
      if constexpr (kIsScaled<T>) {
        for (int key = first; key < last; ++key) {
          float* of_key = scores + key * kTileRows;
          store(of_key, mul(load(of_key), broadcast(key_block.k_scale[key])));
        }
      }
      if (adjusted_) adjust(key_block, row, scores);
      if (key_block.masked) mask_scores(m_, key_block, row, scores, kTileRows);
      too_large_ |= !raise_base(p_, m_, key_block, row, scores, broadcast(scale_),
                                m_.acc + row * p_.head_dim_v, kTileRows);
      store(sums_, zero());
      store(sums_ + kLanes, zero());
    }
    const Vec scale = broadcast(scale_);
    const Vec offset = sub(broadcast(kRoundToInteger), load(m_.base + row));
    Vec sums[2] = {load(sums_), load(sums_ + kLanes)};
    for (int i = 0; i < kGroupKeys; i += 2) {
      float* pair = scores + (weighed_key_ + i) * kTileRows;
      Vec a = exp2_above(load(pair), scale, offset);
      Vec b = exp2_above(load(pair + kTileRows), scale, offset);
      sums[0] = add(sums[0], a);
      sums[1] = add(sums[1], b);
      if constexpr (kIsScaled<T>) {
        a = mul(a, broadcast(key_block.v_scale[weighed_key_ + i]));
        b = mul(b, broadcast(key_block.v_scale[weighed_key_ + i + 1]));
      }
      store_weight_pairs<2>(a, b, pair, kTileRows);
    }
    store(sums_, sums[0]);
    store(sums_ + kLanes, sums[1]);
    weighed_key_ += kGroupKeys;
    if (weighed_key_ < last) return;
    add_to_sums(m_.sum + row, add(sums[0], sums[1]));
    weighed_key_ = first;
    if (++weighed_tile_ == 2) weighed_ = nullptr;
  }

  void adjust(const TileKeyBlock& key_block, int64_t row, float* scores) const {
    const int64_t last_row = row + kTileRows < rows_.count ? row + kTileRows : rows_.count;
    for (int step = key_block.first_step; step < key_block.last_step; ++step) {
      const int64_t key = range_.begin + key_block.key + step * kStepKeys;
      const int64_t count = end_of_step(key, range_.end) - key;
      adjust_columns<kTileRows>(p_, rows_, row, last_row, key, static_cast<int>(count),
                                scores + step * kStepKeys * kTileRows);
    }
  }

  // Adds a block's sums since the last flush to its totals.
  void flush_block(int64_t block) {
    for (int64_t row = block; row < block + kBlockRows; row += kTileRows) {
      flush_sums(p_, m_, row, m_.acc + row * p_.head_dim_v, m_.total + row * p_.head_dim_v,
                 kTileRows);
    }
  }

  // o [rows, head_dim_v], in the order of memory, and lse [rows]; false if o is not finite.
  bool normalise_rows(float* o, float* lse) const {
    bool finite = true;
    // The even dims of 32 lie before the odd ones, but those of 8 bits lie in order.
    const auto place_of_dim = [](int64_t d) {
      const int64_t i = d % kTilePair;
      return kIsScaled<T> ? d : d - i + i / 2 + i % 2 * kTileRows;
    };
    for (int64_t row = 0; row < rows_.count; row += kTileRows) {
      const int64_t count = row + kTileRows < rows_.count ? kTileRows : rows_.count - row;
      finite &= normalise_sums(p_, m_, row, count, m_.total + row * p_.head_dim_v, kTileRows,
                               place_of_dim, o + row * p_.head_dim_v, lse + row);
    }
    return finite;
  }

  const DecodeParams& p_;
  const Rows& rows_;
  const Keys<T> keys_;
  const KeyRange range_;
  const TileRowsMemory m_;
  const int64_t num_rows_;
  const bool adjusted_;
  const float scale_;
  FarPrefetch<T> ahead_;         // of the values of the keys after these
  int64_t lines_per_slice_ = 0;  // which it fetches
  bool too_large_ = false;

  static constexpr int kLocated = 3;  // the next keys, those in use, and those to be packed
  Step<T> steps_[kLocated][kPackedSteps];
  KeyTile tiles_[kPlaces][2 * kPackedSteps];
  int64_t chunks_[kManyRows / kBlockRows] = {};  // of kFlushKeys keys: the last one of each block

  // The vector units' work of an advance, and how it is spread over the matrix unit's.
  static constexpr int kGroupKeys = 8;      // weighed at a time
  static constexpr int64_t kPieceCost = 3;  // of packing a piece, in groups of keys
  static constexpr int64_t kNothingLeft = 1 << 30;
  const TileKeyBlock *weighed_ = nullptr, *packed_ = nullptr;
  int64_t weighed_tile_ = 0, pack_d_ = 0, cost_ = 0, slices_ = 0, budget_ = 0;
  int weighed_key_ = 0, pack_step_ = 0;
  alignas(64) float sums_[2 * kLanes];
};

}  // namespace
}  // namespace tree_attention::cpu
