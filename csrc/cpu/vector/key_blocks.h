// SPDX-License-Identifier: BSD-3-Clause
//
// Many rows, of several query tokens, take keys a few steps at a time, and attend to them
// in blocks of rows: which of these keys the rows of a block see. A memory `m` has of each row
// `begin` and `end`, the keys that it sees, counted from the first one of the call.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/decode_params.h"
#include "common/rows.h"
#include "cpu/vector/keys.h"

namespace tree_attention::cpu {
namespace {

constexpr int kManyRows =
    32 * kLanes;  // rows of an output, whose state fits the second-level cache

// base [row] of no key so far: below the score of any key.
constexpr float kNoBase = -FLT_MAX;
// A base follows the largest score only when that exceeds it by this much, because then everything
// summed so far has to be rescaled. Weights up to 2^16 cost no digits: float32 has the exponents.
constexpr float kBaseSlack = 16;

// Calls body(part, its first row) for parts of `rows` of `size` rows, or fewer in the last.
template <typename Body>
inline void for_parts(const Rows& rows, int64_t size, const Body& body) {
  for (int64_t row = 0; row < rows.count; row += size) {
    const int64_t count = row + size < rows.count ? size : rows.count - row;
    body(Rows{rows.batch, rows.head_kv, rows.begin + row, count}, row);
  }
}

// The packed keys that a block of rows sees.
struct KeyBlock {
  int64_t row;                // the first of the block
  int64_t key;                // the first packed one, counted from the first one of the call
  int first_step, last_step;  // of the packed keys: those that some row sees
  bool masked;                // some row does not see all of their keys

  int num_steps() const { return last_step - first_step; }
};

// Fills m.begin and m.end of num_rows rows. False if a key is seen by no row: it may not be read.
template <typename Memory>
inline bool locate_ranges(const DecodeParams& p, const Rows& rows, KeyRange keys, int64_t num_rows,
                          const Memory& m) {
  const int64_t group_size = p.group_size();
  KeyRange seen{0, 0};
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t packed = rows.begin + (row < rows.count ? row : rows.count - 1);
    if (row > 0 && packed % group_size != 0) {  // a neighbour of the same token
      m.begin[row] = m.begin[row - 1];
      m.end[row] = m.end[row - 1];
      continue;
    }
    KeyRange range = key_range(p, rows.batch, packed / group_size);
    if (range.begin < keys.begin) range.begin = keys.begin;
    if (range.end > keys.end) range.end = keys.end;
    if (range.empty()) range = {keys.begin, keys.begin};
    m.begin[row] = static_cast<int32_t>(range.begin - keys.begin);
    m.end[row] = static_cast<int32_t>(range.end - keys.begin);
    if (range.empty()) continue;
    const bool gap = !seen.empty() && (range.begin > seen.end || range.end < seen.begin);
    if (gap) return false;
    seen = hull(seen, range);
  }
  return seen.begin == keys.begin && seen.end == keys.end;
}

// Which of the packed keys [key, key + num_keys) rows [row, row + num_rows) see; false if none.
template <typename Memory>
inline bool find_visible_keys(const Memory& m, int64_t row, int64_t num_rows, int64_t key,
                              int64_t num_keys, KeyBlock& key_block) {
  int32_t first_begin = m.begin[row], last_begin = first_begin;
  int32_t first_end = m.end[row], last_end = first_end;
  bool some = false;
  for (int64_t i = row; i < row + num_rows; ++i) {
    const int32_t begin = m.begin[i], end = m.end[i];
    if (begin > last_begin) last_begin = begin;
    if (end < first_end) first_end = end;
    if (begin == end) continue;
    if (!some || begin < first_begin) first_begin = begin;
    if (!some || end > last_end) last_end = end;
    some = true;
  }
  const int64_t begin = first_begin > key ? first_begin - key : 0;
  const int64_t end = last_end < key + num_keys ? last_end - key : num_keys;
  if (!some || begin >= end) return false;
  key_block.row = row;
  key_block.key = key;
  key_block.first_step = static_cast<int>(begin / kStepKeys);
  key_block.last_step = static_cast<int>((end + kStepKeys - 1) / kStepKeys);
  key_block.masked = last_begin > key + key_block.first_step * kStepKeys ||
                     first_end < key + key_block.last_step * kStepKeys;
  return true;
}

}  // namespace
}  // namespace tree_attention::cpu
