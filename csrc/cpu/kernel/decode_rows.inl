// SPDX-License-Identifier: BSD-3-Clause
//
// Attention with vectors, included inside the namespace of an instruction set. Lanes run over
// head_dim. Keys come in steps small enough for their K and V rows to stay in the first-level cache
// while all query rows use them; every element of K and V is loaded from memory once.

// What fetches while a block of rows computes: nothing,
struct NoPrefetch {
  void fetch(int, int64_t) {}
};

// the rows ahead where the loop is in its own,
template <typename T>
struct ColumnPrefetch {
  const T* const* ahead;
  void fetch(int key, int64_t d) { prefetch_pair(ahead[key] + d); }
};

// or rows in the order of memory, which is all that the hardware's own prefetching follows, and
// `far` into the second level (see kFarKeys). It pays where keys come from memory.
template <typename T>
class RowPrefetch {
 public:
  RowPrefetch(const T* const* near, const T* const* far, int count, int64_t head_dim)
      : near_(near), far_(far), count_(count), head_dim_(head_dim) {}

  void fetch(int, int64_t) {
    if (row_ == count_) return;
    prefetch_pair(near_[row_] + d_);
    prefetch_pair_far(far_[row_] + d_);
    d_ += kPair;
    if (d_ >= head_dim_) {
      d_ = 0;
      ++row_;
    }
  }

 private:
  const T* const* const near_;
  const T* const* const far_;
  const int count_;
  const int64_t head_dim_;
  int row_ = 0;
  int64_t d_ = 0;
};

// Scores of kRows query rows and kKeyBlock keys.
template <int kRows, typename T, typename Prefetch>
inline void score_block(const T* const* k, Prefetch&& ahead, const float* q, int64_t head_dim,
                        float* scores) {
  const int64_t q_stride = padded(head_dim);
  Vec sums[kRows][kKeyBlock];
  for (int row = 0; row < kRows; ++row) {
    for (int key = 0; key < kKeyBlock; ++key) sums[row][key] = zero();
  }
  const auto accumulate = [&](int64_t d, const auto& load_keys) {
    Vec even[kKeyBlock], odd[kKeyBlock];
    for (int key = 0; key < kKeyBlock; ++key) {
      ahead.fetch(key, d);
      load_keys(k[key] + d, even[key], odd[key]);
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec q_even = load(q + row * q_stride + d),
                q_odd = load(q + row * q_stride + d + kLanes);
      for (int key = 0; key < kKeyBlock; ++key) {
        sums[row][key] = fma(q_even, even[key], sums[row][key]);
        sums[row][key] = fma(q_odd, odd[key], sums[row][key]);
      }
    }
  };
  int64_t d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
    accumulate(d, [](const T* p, Vec& a, Vec& b) { load_pair(p, a, b); });
  }
  if (d < head_dim) {
    const int rest = static_cast<int>(head_dim - d);
    accumulate(d, [rest](const T* p, Vec& a, Vec& b) { load_pair(p, rest, a, b); });
  }
  store_sums<kRows>(sums, scores, kStepKeys);
}

template <int kRows, typename T, typename Prefetch>
inline void value_block(const Step<T>& step, Prefetch&& ahead, const float* weights,
                        const float* rescale, int64_t head_dim, float* acc) {
  const int64_t stride = padded(head_dim);
  const auto accumulate = [&](int64_t d, const auto& load_values) {
    Vec even[kRows], odd[kRows];
    for (int row = 0; row < kRows; ++row) even[row] = odd[row] = zero();
    for (int key = 0; key < step.count; ++key) {
      ahead.fetch(key, d);
      Vec v_even, v_odd;
      load_values(step.v[key] + d, v_even, v_odd);
      for (int row = 0; row < kRows; ++row) {
        const Vec weight = broadcast(weights[row * kStepKeys + key]);
        even[row] = fma(weight, v_even, even[row]);
        odd[row] = fma(weight, v_odd, odd[row]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec factor = broadcast(rescale[row]);
      float* sums = acc + row * stride + d;
      store(sums, fma(load(sums), factor, even[row]));
      store(sums + kLanes, fma(load(sums + kLanes), factor, odd[row]));
    }
  };
  int64_t d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
    accumulate(d, [](const T* p, Vec& a, Vec& b) { load_pair(p, a, b); });
  }
  if (d < head_dim) {
    const int rest = static_cast<int>(head_dim - d);
    accumulate(d, [rest](const T* p, Vec& a, Vec& b) { load_pair(p, rest, a, b); });
  }
}

// Calls body<n>(first row) for consecutive blocks of n <= kRowBlock rows.
template <typename Body>
inline void for_row_blocks(int64_t begin, int64_t end, const Body& body) {
  static_assert(kRowBlock == 4);
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) body.template operator()<4>(row);
  switch (end - row) {
    case 3:
      body.template operator()<3>(row);
      break;
    case 2:
      body.template operator()<2>(row);
      break;
    case 1:
      body.template operator()<1>(row);
      break;
    default:
      break;
  }
}

// Global positions of the keys of a step.
inline void locate_positions(const KeyLayout& layout, int64_t key_begin, int64_t* positions) {
  int64_t offset = key_begin % layout.block;
  int64_t position = key_position(layout, key_begin);
  for (int i = 0; i < kStepKeys; ++i) {
    positions[i] = position++;
    if (++offset == layout.block) {
      offset = 0;
      position += layout.stride - layout.block;
    }
  }
}

// Soft-cap, then ALiBi, in base 2, on the scores of one row.
inline void adjust_scores(const DecodeParams& p, const Rows& rows, int64_t row, int64_t key_begin,
                          float* scores) {
  if (p.softcap != 0.0f) {  // q was scaled by softmax_scale / softcap
    const Vec factor = broadcast(p.softcap * kLog2E);
    for (int i = 0; i < kStepKeys; i += kLanes) {
      store(scores + i, mul(tanh(load(scores + i)), factor));
    }
  }
  if (p.alibi_slopes != nullptr) {
    const auto [token, head] = place_of_row(p, rows, row);
    const float slope = -kLog2E * p.alibi_slopes[head];
    const int64_t position = query_position(p, rows.batch, token);
    int64_t key_positions[kStepKeys];
    locate_positions(p.key_layout, key_begin, key_positions);
    // The difference is exact in integers; positions in the millions are not, in float32.
    float distances[kStepKeys];
    for (int i = 0; i < kStepKeys; ++i) {
      distances[i] = static_cast<float>(position - key_positions[i]);
    }
    for (int i = 0; i < kStepKeys; i += kLanes) {
      store(scores + i, fma(broadcast(slope), load(distances + i), load(scores + i)));
    }
  }
}

// Online softmax: scores become weights; returns what the row's sums so far are multiplied by.
inline float softmax_row(int count, float* scores, float& max, double& sum) {
  for (int i = count; i < kStepKeys; ++i) scores[i] = -INFINITY;
  Vec step_max = load(scores);
  for (int i = kLanes; i < kStepKeys; i += kLanes) {
    step_max = max_keep_nan(step_max, load(scores + i));
  }
  const float old_max = max;
  const float largest = reduce_max(step_max);
  if (largest > max) max = largest;
  const float base = max == -INFINITY ? 0.0f : max;  // -inf - -inf would be NaN
  Vec step_sum = zero();
  for (int i = 0; i < kStepKeys; i += kLanes) {
    const Vec weight = exp2_nonpositive(sub(load(scores + i), broadcast(base)));
    step_sum = add(step_sum, weight);
    store(scores + i, weight);
  }
  const float rescale = max == old_max ? 1.0f : __builtin_exp2f(old_max - base);
  sum = sum * rescale + reduce_add(step_sum);
  return rescale;
}

// Rows [row_begin, row_end), all of which see all keys of `step`, which begins at key_begin. Values
// are fetched while scores are computed, the next step's keys while values are summed.
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
  const bool adjusted = p.softcap != 0.0f || p.alibi_slopes != nullptr;
  for (int64_t row = row_begin; row < row_end; ++row) {
    float* scores = state.scores + row * kStepKeys;
    if (adjusted) adjust_scores(p, rows, row, key_begin, scores);
    rescale[row] = softmax_row(step.count, scores, state.max[row], state.sum[row]);
  }
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

// The same with the prefetching that suits where the keys come from; far is null where few follow.
template <typename T>
inline void attend_step(const DecodeParams& p, const Rows& rows, const RowState& state,
                        int64_t row_begin, int64_t row_end, int64_t key_begin, const Step<T>& step,
                        const Step<T>& next, const Step<T>* far) {
  if (far == nullptr) {
    attend_step_with<T>(
        p, rows, state, row_begin, row_end, key_begin, step,
        [&](int key) { return ColumnPrefetch<T>{step.v + key}; }, ColumnPrefetch<T>{next.k});
  } else {
    RowPrefetch<T> values(step.v, far->v, step.count, p.head_dim_v);
    attend_step_with<T>(
        p, rows, state, row_begin, row_end, key_begin, step,
        [&](int) -> RowPrefetch<T>& { return values; },
        RowPrefetch<T>(next.k, far->k, next.count, p.head_dim));
  }
}

inline int64_t end_of_step(int64_t begin, int64_t end) {
  return begin + kStepKeys < end ? begin + kStepKeys : end;
}

// Calls body(first key, step, next step, keys kFarKeys later or null) over the steps of
// [begin, end). Next steps go on to `limit`; the last one is its own next.
template <typename T, typename Body>
inline void for_steps(const DecodeParams& p, const Rows& rows, int64_t begin, int64_t end,
                      int64_t limit, const Body& body) {
  Step<T> steps[2], far;
  const bool many_keys = limit - begin >= kManyKeys;
  locate(p, rows, begin, end_of_step(begin, end), steps[0]);
  for (int current = 0; begin < end; current = 1 - current) {
    const int64_t next = begin + steps[current].count;
    if (next < limit) locate(p, rows, next, end_of_step(next, limit), steps[1 - current]);
    const Step<T>& following = steps[next < limit ? 1 - current : current];
    const int64_t far_begin = next + kFarKeys;
    const bool has_far = many_keys && far_begin < limit;
    if (has_far) locate(p, rows, far_begin, end_of_step(far_begin, limit), far);
    body(begin, steps[current], following, has_far ? &far : nullptr);
    begin = next;
  }
}

// All rows, over keys that all of them see; keys from `end` to `limit` will follow.
template <typename T>
inline void attend_vectors(const DecodeParams& p, const Rows& rows, const RowState& state,
                           int64_t begin, int64_t end, int64_t limit) {
  for_steps<T>(p, rows, begin, end, limit,
               [&](int64_t key, const Step<T>& step, const Step<T>& next, const Step<T>* far) {
                 attend_step<T>(p, rows, state, 0, rows.count, key, step, next, far);
               });
}

// The same, right after a flush; instruction sets with matrices specialise it.
template <typename T>
struct SharedKeys {
  static void attend(const DecodeParams& p, const Rows& rows, const RowState& state, int64_t begin,
                     int64_t end, int64_t limit) {
    attend_vectors<T>(p, rows, state, begin, end, limit);
  }
};

inline float score_scale(const DecodeParams& p) {
  return p.softcap == 0.0f ? p.softmax_scale * kLog2E : p.softmax_scale / p.softcap;
}

template <typename T>
inline void load_queries(const DecodeParams& p, const Rows& rows, float* q) {
  const Vec scale = broadcast(score_scale(p));
  for (int64_t row = 0; row < rows.count; ++row, q += padded(p.head_dim)) {
    const auto [token, head] = place_of_row(p, rows, row);
    const T* source = static_cast<const T*>(p.q) + rows.batch * p.q_stride[0] +
                      head * p.q_stride[1] + token * p.q_stride[2];
    for (int64_t d = 0; d < p.head_dim; d += kPair) {
      Vec a, b;
      if (d + kPair <= p.head_dim) {
        load_pair(source + d, a, b);
      } else {
        load_pair(source + d, static_cast<int>(p.head_dim - d), a, b);
      }
      store(q + d, mul(a, scale));
      store(q + d + kLanes, mul(b, scale));
    }
  }
}

// Adds the rows' sums since the last flush to their totals.
inline void flush(const DecodeParams& p, int64_t num_rows, const RowState& state) {
  const int64_t stride = padded(p.head_dim_v);
  for (int64_t row = 0; row < num_rows; ++row) {
    const float max = state.max[row], old_max = state.total_max[row];
    const Vec factor = broadcast(max == old_max ? 1.0f : __builtin_exp2f(old_max - max));
    float *total = state.total + row * stride, *acc = state.acc + row * stride;
    for (int64_t d = 0; d < stride; d += kLanes) {
      store(total + d, fma(load(total + d), factor, load(acc + d)));
      store(acc + d, zero());
    }
    state.total_max[row] = max;
  }
}

template <typename T>
inline void normalise(const DecodeParams& p, const Rows& rows, const RowState& state, float* o,
                      float* lse) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const float sum = static_cast<float>(state.sum[row]);
    const bool empty = sum == 0.0f;
    lse[row] = empty ? -INFINITY : state.max[row] * kLn2 + __builtin_logf(sum);
    const Vec factor = broadcast(empty ? 0.0f : 1.0f / sum);
    const float* total = state.total + row * padded(p.head_dim_v);
    float* out = o + row * p.head_dim_v;
    for (int64_t d = 0; d < p.head_dim_v; d += kPair) {
      Vec a = mul(load(total + d), factor), b = mul(load(total + d + kLanes), factor);
      to_memory_order(static_cast<const T*>(nullptr), a, b);
      if (d + kPair <= p.head_dim_v) {
        store(out + d, a);
        store(out + d + kLanes, b);
      } else {
        float tail[kPair];
        store(tail, a);
        store(tail + kLanes, b);
        __builtin_memcpy(out + d, tail, (p.head_dim_v - d) * sizeof(float));
      }
    }
  }
}

template <typename T>
void attend_rows(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace, float* o,
                 float* lse) {
  const RowState state = carve(p, rows.count, workspace);
  load_queries<T>(p, rows, state.q);
  for (int64_t i = 0; i < rows.count * padded(p.head_dim_v); ++i) {
    state.acc[i] = state.total[i] = 0.0f;
  }
  for (int64_t row = 0; row < padded_rows(rows.count); ++row) {
    state.max[row] = state.total_max[row] = -INFINITY;
    state.sum[row] = 0.0;
  }

  // Keys that every row sees are taken for all rows at once, others token by token. So no row ever
  // touches a key outside its range: no mask, and no 0 * NaN.
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
        attend_step<T>(p, rows, state, row < 0 ? 0 : row,
                       row + group_size < rows.count ? row + group_size : rows.count, low, step,
                       step, nullptr);
      }
    }
  };
  const auto attend_shared = [&](int64_t begin, int64_t end) {
    SharedKeys<T>::attend(p, rows, state, begin, end, common.end);
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
  normalise<T>(p, rows, state, o, lse);
}
