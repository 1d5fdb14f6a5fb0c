// SPDX-License-Identifier: BSD-3-Clause
//
// Attention with vectors, included inside the namespace of an instruction set. Lanes run over
// head_dim. Keys come in steps small enough for their K and V rows to stay in the first-level cache
// while all query rows use them; every element of K and V is loaded from memory once.

// Adds the keys of `step`, which begins at key_begin, to rows [row_begin, row_end), all of which
// see all of them. Values are fetched while scores are computed, the next step's keys while values
// are summed.
template <typename T, typename FetchValues, typename FetchKeys>
inline void attend_step_with(const DecodeParams& p, const Rows& rows, const RowState& state,
                             int64_t row_begin, int64_t row_end, int64_t key_begin,
                             const Step<T>& step, const FetchValues& fetch_values,
                             FetchKeys fetch_keys) {
  for (int key = 0; key < step.count; key += kKeyBlock) {
    for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
      const float* q = state.q + row * padded(p.head_dim);
      float* scores = state.scores + row * kStepKeys + key;
      if (row == row_begin) {
        score_block<kRows>(step.k + key, fetch_values(key), q, p.head_dim, scores);
      } else {
        score_block<kRows>(step.k + key, NoPrefetch{}, q, p.head_dim, scores);
      }
    });
  }
  float rescale[kMaxRows];
  weigh_step(p, rows, state, row_begin, row_end, key_begin, step, 1.0f, rescale);
  for_row_blocks(row_begin, row_end, [&]<int kRows>(int64_t row) {
    const float* weights = state.scores + row * kStepKeys;
    float* acc = state.acc + row * padded(p.head_dim_v);
    if (row == row_begin) {
      value_block<kRows>(step, fetch_keys, weights, rescale + row, p.head_dim_v, acc);
    } else {
      value_block<kRows>(step, NoPrefetch{}, weights, rescale + row, p.head_dim_v, acc);
    }
  });
}

// attend_step_with, with the prefetching that suits where the keys come from: `window` is null
// where few keys follow.
template <typename T>
inline void attend_step(const DecodeParams& p, const Rows& rows, const RowState& state,
                        int64_t row_begin, int64_t row_end, int64_t key_begin, const Step<T>& step,
                        const Step<T>& next, Window<T>* window) {
  if (window == nullptr) {
    attend_step_with<T>(
        p, rows, state, row_begin, row_end, key_begin, step,
        [&](int key) { return ColumnPrefetch<T>{step.v + key}; }, ColumnPrefetch<T>{next.k});
  } else {
    WindowPrefetch<T> prefetch(*window);
    attend_step_with<T>(
        p, rows, state, row_begin, row_end, key_begin, step,
        [&](int) -> WindowPrefetch<T>& { return prefetch; }, prefetch);
  }
}

// Adds keys [begin, end) to all rows, which see all of them; keys from `end` to `limit` will
// follow.
template <typename T>
inline void attend_vectors(const DecodeParams& p, const Rows& rows, const RowState& state,
                           int64_t begin, int64_t end, int64_t limit) {
  for_steps<T, Window<T>>(
      p, rows, begin, end, limit,
      [&](int64_t key, const Step<T>& step, const Step<T>& next, Window<T>* window) {
        attend_step<T>(p, rows, state, 0, rows.count, key, step, next, window);
      });
}

// attend_vectors right after a flush; an instruction set with matrices specialises it.
template <typename T>
struct SharedKeys {
  static void attend(const DecodeParams& p, const Rows& rows, const RowState& state, int64_t begin,
                     int64_t end, int64_t limit) {
    attend_vectors<T>(p, rows, state, begin, end, limit);
  }
};

// The partial state of `rows` over their keys in `keys`: see Kernels::attend. kDots: with products
// of pairs of bfloat16 (bf16_few_rows.inl), for bfloat16 queries.
template <typename T, bool kDots>
void attend_rows(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace, float* o,
                 float* lse) {
  const RowState state = carve(p, rows.count, workspace);
  if constexpr (kDots) {
    Dots<T>::load_queries(p, rows, state.q);
  } else {
    with_dtype(p.dtype, [&]<typename Q>() { load_queries<Q, T>(p, rows, state.q); });
  }
  for (int64_t i = 0; i < rows.count * padded(p.head_dim_v); ++i) {
    state.acc[i] = state.total[i] = 0.0f;
  }
  for (int64_t row = 0; row < padded_rows(rows.count); ++row) {
    state.max[row] = state.total_max[row] = -INFINITY;
    state.sum[row] = 0.0;
  }

  // Keys that every row sees are taken for all rows at once, others token by token. So no row ever
  // touches a key outside its range: there is no mask, and a NaN outside is not multiplied by 0.
  const int64_t group_size = p.group_size();
  const int64_t first_token = rows.begin / group_size;
  const int64_t last_token = (rows.begin + rows.count - 1) / group_size;
  KeyRange common = keys;
  for (int64_t token = first_token; token <= last_token; ++token) {
    const KeyRange range = key_range(p, rows.batch, token);
    if (range.begin > common.begin) common.begin = range.begin;
    if (range.end < common.end) common.end = range.end;
  }
  if (common.end <= common.begin) common = {keys.end, keys.end};

  const auto attend_tokens = [&](int64_t begin, int64_t end) {
    for (int64_t step_end; begin < end; begin = step_end) {
      step_end = end_of_step(begin, end);
      for (int64_t token = first_token; token <= last_token; ++token) {
        const KeyRange range = key_range(p, rows.batch, token);
        const int64_t low = range.begin > begin ? range.begin : begin;
        const int64_t high = range.end < step_end ? range.end : step_end;
        if (low >= high) continue;
        const int64_t row = token * group_size - rows.begin;
        Step<T> step;
        locate(p, rows, low, high, step);
        const int64_t first = row < 0 ? 0 : row;
        const int64_t last = row + group_size < rows.count ? row + group_size : rows.count;
        if constexpr (kDots) {
          Dots<T>::attend_step(p, rows, state, first, last, low, step, nullptr);
        } else {
          attend_step<T>(p, rows, state, first, last, low, step, step, nullptr);
        }
      }
    }
  };
  const auto attend_shared = [&](int64_t begin, int64_t end) {
    if constexpr (kDots) {
      using Ahead = typename Dots<T>::Ahead;
      for_steps<T, Ahead>(
          p, rows, begin, end, common.end,
          [&](int64_t key, const Step<T>& step, const Step<T>&, const Ahead* ahead) {
            Dots<T>::attend_step(p, rows, state, 0, rows.count, key, step, ahead);
          });
    } else {
      SharedKeys<T>::attend(p, rows, state, begin, end, common.end);
    }
  };
  const auto flushed = [&](int64_t begin, int64_t end, const auto& attend) {
    for (int64_t next; begin < end; begin = next) {
      next = begin + kFlushKeys < end ? begin + kFlushKeys : end;
      attend(begin, next);
      flush(p, rows.count, state);
    }
  };
  flushed(keys.begin, common.begin, attend_tokens);
  flushed(common.begin, common.end, attend_shared);
  flushed(common.end, keys.end, attend_tokens);
  if constexpr (kDots) {
    normalise<BFloat16>(p, rows, state, o, lse);
  } else {
    normalise<T>(p, rows, state, o, lse);
  }
}
