// SPDX-License-Identifier: BSD-3-Clause
//
// Attention of up to kMaxRows rows. Keys come in steps small enough for their K and V rows to stay
// in the first-level cache while all query rows use them; every element of K and V is loaded from
// memory once.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "common/rows.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/products.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

// scores [kStepKeys] of one row times the scales [kStepKeys] of their keys.
inline void scale_row(const float* scales, float* scores) {
  for (int i = 0; i < kStepKeys; i += kLanes) {
    store(scores + i, mul(load(scores + i), load(scales + i)));
  }
}

// What a call of Kernels::attend does whatever multiplies: the walk over keys of type T, and the
// way from scores to weights.
template <typename T>
class RowsAttention {
 protected:
  RowsAttention(const DecodeParams& p, const Rows& rows, void* workspace, int64_t v_stride)
      : p_(p),
        rows_(rows),
        first_token_(rows.begin / p.group_size()),
        last_token_((rows.begin + rows.count - 1) / p.group_size()),
        adjusted_(p.softcap != 0.0f || p.alibi_slopes != nullptr),
        keys_(p, rows),
        state_(p, rows, workspace, v_stride) {}

  // Adds the keys of `range` to the state of the rows that see them. Keys that every row sees are
  // added for all of them by attend_shared(begin, end, limit), right after a flush; keys from `end`
  // to `limit` will follow. Others are added for the rows of a token by attend_step(first row, last
  // row, first key, step). So no row ever touches a key outside its range: there is no mask, and a
  // NaN outside is not multiplied by 0.
  template <typename AttendStep, typename AttendShared>
  void walk(KeyRange range, const AttendStep& attend_step, const AttendShared& attend_shared) {
    state_.clear();
    const KeyRange shared = keys_of_all_rows(range);
    const auto attend_own = [&](int64_t begin, int64_t end) {
      attend_tokens(begin, end, attend_step);
    };
    flushed(range.begin, shared.begin, attend_own);
    flushed(shared.begin, shared.end,
            [&](int64_t begin, int64_t end) { attend_shared(begin, end, shared.end); });
    flushed(shared.end, range.end, attend_own);
  }

  // walk, where attend_step(first row, last row, first key, step, ahead) adds all keys, `ahead`
  // being the lines that it fetches meanwhile, or null.
  template <typename AttendStep>
  void walk_in_order(KeyRange range, const AttendStep& attend_step) {
    const LinesAhead<T>* const nothing = nullptr;
    const auto attend_own = [&](int64_t row_begin, int64_t row_end, int64_t key,
                                const Step<T>& step) {
      attend_step(row_begin, row_end, key, step, nothing);
    };
    if constexpr (kShortVectors) {  // of ARM, where no fetching has been measured
      walk(range, attend_own, [&](int64_t begin, int64_t end, int64_t) {
        Step<T> step;
        for (; begin < end; begin += step.count) {
          keys_.locate(begin, end_of_step(begin, end), step);
          attend_own(0, rows_.count, begin, step);
        }
      });
    } else {
      walk(range, attend_own, [&](int64_t begin, int64_t end, int64_t limit) {
        for_steps<T, LinesAhead<T>>(
            p_, keys_, begin, end, limit,
            [&](int64_t key, const Step<T>& step, const Step<T>&, const LinesAhead<T>* ahead) {
              attend_step(int64_t{0}, rows_.count, key, step, ahead);
            });
      });
    }
  }

  // Scores of a step, times `scale`, to the weights of its values, for rows [row_begin, row_end),
  // and the factors by which their sums so far are to be multiplied.
  void weigh_rows(int64_t row_begin, int64_t row_end, int64_t first_key, const Step<T>& step,
                  float scale, float* rescale) const {
    for (int64_t row = row_begin; row < row_end; ++row) {
      float* scores = state_.scores + row * kStepKeys;
      if constexpr (kIsScaled<T>) scale_row(step.k_scale, scores);
      if (scale != 1.0f) {
        for (int i = 0; i < kStepKeys; i += kLanes) {
          store(scores + i, mul(load(scores + i), broadcast(scale)));
        }
      }
      if (adjusted_) adjust_scores(p_, rows_, row, first_key, scores);
      rescale[row] = softmax_row(step.count, scores, state_.base[row], state_.sum[row]);
      if constexpr (kIsScaled<T>) scale_row(step.v_scale, scores);
    }
  }

  const DecodeParams& p_;
  const Rows& rows_;
  const int64_t first_token_, last_token_;  // of the rows
  const bool adjusted_;                     // by soft-cap or ALiBi
  const Keys<T> keys_;
  const RowState state_;

 private:
  // The keys of `range` that every row sees; an empty range lies at the end.
  KeyRange keys_of_all_rows(KeyRange range) const {
    KeyRange common = range;
    for (int64_t token = first_token_; token <= last_token_; ++token) {
      const KeyRange seen = key_range(p_, rows_.batch, token);
      if (seen.begin > common.begin) common.begin = seen.begin;
      if (seen.end < common.end) common.end = seen.end;
    }
    return common.end <= common.begin ? KeyRange{range.end, range.end} : common;
  }

  // Calls attend(begin, end) for the keys [begin, end), with a flush after every kFlushKeys.
  template <typename Attend>
  void flushed(int64_t begin, int64_t end, const Attend& attend) const {
    for (int64_t next; begin < end; begin = next) {
      next = begin + kFlushKeys < end ? begin + kFlushKeys : end;
      attend(begin, next);
      state_.flush();
    }
  }

  // Adds keys [begin, end) to the rows that see them.
  template <typename AttendStep>
  void attend_tokens(int64_t begin, int64_t end, const AttendStep& attend_step) const {
    const int64_t group_size = p_.group_size();
    for (int64_t step_end; begin < end; begin = step_end) {
      step_end = end_of_step(begin, end);
      for (int64_t token = first_token_; token <= last_token_; ++token) {
        const KeyRange seen = key_range(p_, rows_.batch, token);
        const int64_t low = seen.begin > begin ? seen.begin : begin;
        const int64_t high = seen.end < step_end ? seen.end : step_end;
        if (low >= high) continue;
        const int64_t row = token * group_size - rows_.begin;
        Step<T> step;
        keys_.locate(low, high, step);
        attend_step(row < 0 ? 0 : row,
                    row + group_size < rows_.count ? row + group_size : rows_.count, low, step);
      }
    }
  }
};

// With float32 products, whose lanes run over head_dim.
template <typename T>
class VectorAttention : protected RowsAttention<T> {
 public:
  VectorAttention(const DecodeParams& p, const Rows& rows, void* workspace)
      : RowsAttention<T>(p, rows, workspace, padded(p.head_dim_v)) {}

  // The partial state of the rows over their keys in `range`: see Kernels::attend.
  void run(KeyRange range, float* o, float* lse) {
    run(range, o, lse,
        [this](int64_t begin, int64_t end, int64_t limit) { attend_shared(begin, end, limit); });
  }

 protected:
  using RowsAttention<T>::p_, RowsAttention<T>::rows_, RowsAttention<T>::state_,
      RowsAttention<T>::keys_, RowsAttention<T>::adjusted_;

  // run, where keys that all rows see are added by `attend_shared`.
  template <typename AttendShared>
  void run(KeyRange range, float* o, float* lse, const AttendShared& attend_shared) {
    state_.template load_queries<T>();
    this->walk(
        range,
        [this](int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step) {
          attend_step(row_begin, row_end, key, step, step, nullptr);
        },
        attend_shared);
    state_.template normalise<T>(o, lse);
  }

  // Adds keys [begin, end) to all rows, which see all of them; keys from `end` to `limit` will
  // follow.
  void attend_shared(int64_t begin, int64_t end, int64_t limit) {
    for_steps<T, Window<T>>(
        p_, keys_, begin, end, limit,
        [&](int64_t key, const Step<T>& step, const Step<T>& next, Window<T>* window) {
          attend_step(0, rows_.count, key, step, next, window);
        });
  }

 private:
  // Adds the keys of `step`, which begins at `key`, to rows [row_begin, row_end), all of which see
  // all of them. Where many keys follow, their window is fetched meanwhile. Otherwise `window` is
  // null, and values are fetched while scores are computed, the next step's keys while values are
  // summed.
  void attend_step(int64_t row_begin, int64_t row_end, int64_t key, const Step<T>& step,
                   const Step<T>& next, Window<T>* window) {
    if (window == nullptr) {
      attend_step_with(
          row_begin, row_end, key, step, [&](int i) { return fetch_columns(step.v + i); },
          fetch_columns(next.k));
    } else {
      auto fetch = fetch_window(*window);
      attend_step_with(row_begin, row_end, key, step, [&](int) -> auto& { return fetch; }, fetch);
    }
  }

  // fetch_values(key of the step) and fetch_keys: what the first block of rows fetches.
  template <typename FetchValues, typename FetchKeys>
  void attend_step_with(int64_t row_begin, int64_t row_end, int64_t first_key, const Step<T>& step,
                        const FetchValues& fetch_values, FetchKeys fetch_keys) {
    for (int key = 0; key < step.count; key += kKeyBlock) {
      for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
        const float* q = state_.q + row * padded(p_.head_dim);
        float* scores = state_.scores + row * kStepKeys + key;
        if (row == row_begin) {
          score_block<kRows>(step.k + key, fetch_values(key), q, p_.head_dim, scores);
        } else {
          score_block<kRows>(step.k + key, fetch_nothing(), q, p_.head_dim, scores);
        }
      });
    }
    float rescale[kMaxRows];
    this->weigh_rows(row_begin, row_end, first_key, step, 1.0f, rescale);
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      const float* weights = state_.scores + row * kStepKeys;
      float* acc = state_.acc + row * padded(p_.head_dim_v);
      if (row == row_begin) {
        value_block<kRows>(step, fetch_keys, weights, rescale + row, p_.head_dim_v, acc);
      } else {
        value_block<kRows>(step, fetch_nothing(), weights, rescale + row, p_.head_dim_v, acc);
      }
    });
  }
};

}  // namespace
}  // namespace tree_attention::cpu
