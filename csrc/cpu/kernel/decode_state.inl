// SPDX-License-Identifier: BSD-3-Clause
//
// What a call knows of its rows, from their scaled queries to their partial state (o, lse).
// Included inside the namespace of an instruction set.

// Keys between two flushes.
constexpr int64_t kFlushKeys = 64 * kStepKeys;

// Scratch memory of one call, in float32 and in the lane order of load_pair. Products of weights
// and values are summed in three levels: over a step, over up to kFlushKeys keys (acc) and over all
// keys (total). At 256k keys one chain of additions has ten times the rounding error of a blocked
// matrix product, three levels have less than it.
struct RowState {
  float* q;          // [rows, padded(head_dim)], scaled by score_scale
  float* acc;        // [rows, padded(head_dim_v)], of the keys since the last flush
  float* total;      // [rows, padded(head_dim_v)], of the keys before it
  float* scores;     // [rows, kStepKeys]
  double* sum;       // [rows], of all weights
  float* max;        // [rows], the largest score
  float* total_max;  // [rows], the largest score up to the last flush
  char* matrices;    // where an instruction set with matrices keeps them
};

constexpr int64_t kLine = 64 / sizeof(float);  // floats of a cache line, at which arrays begin

// The number of rows that instructions work on; rows beyond num_rows are computed and never used.
inline int64_t padded_rows(int64_t num_rows) { return (num_rows + kLine - 1) / kLine * kLine; }

// Cuts the workspace into the arrays of a RowState.
inline RowState carve(const DecodeParams& p, int64_t num_rows, void* workspace) {
  num_rows = padded_rows(num_rows);
  RowState state;
  state.q = static_cast<float*>(workspace);
  state.acc = state.q + num_rows * padded(p.head_dim);
  state.total = state.acc + num_rows * padded(p.head_dim_v);
  state.scores = state.total + num_rows * padded(p.head_dim_v);
  state.sum = reinterpret_cast<double*>(state.scores + num_rows * kStepKeys);
  state.max = reinterpret_cast<float*>(state.sum + num_rows);
  state.total_max = state.max + num_rows;
  state.matrices = reinterpret_cast<char*>(state.total_max + num_rows);
  return state;
}

inline size_t state_bytes(const DecodeParams& p, int64_t num_rows) {
  return padded_rows(num_rows) * (padded(p.head_dim) + 2 * padded(p.head_dim_v) + kStepKeys + 4) *
         sizeof(float);
}

// q [rows.count, padded(head_dim)] = the rows' queries of type Q times score_scale, in the lane
// order of keys of type T.
template <typename Q, typename T>
inline void load_queries(const DecodeParams& p, const Rows& rows, float* q) {
  const Vec scale = broadcast(score_scale(p));
  for (int64_t row = 0; row < rows.count; ++row, q += padded(p.head_dim)) {
    const auto [token, head] = place_of_row(p, rows, row);
    const Q* source = static_cast<const Q*>(p.q) + rows.batch * p.q_stride[0] +
                      head * p.q_stride[1] + token * p.q_stride[2];
    for (int64_t d = 0; d < p.head_dim; d += kPair) {
      Vec a, b;
      if (d + kPair <= p.head_dim) {
        load_pair(source + d, a, b);
      } else {
        load_pair(source + d, static_cast<int>(p.head_dim - d), a, b);
      }
      if constexpr (kIsScaled<T>) to_memory_order(source, a, b);  // that of 8 bits
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

// o [rows.count, head_dim_v], in the order of memory, and lse [rows.count] from the totals.
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

// scores [kStepKeys] of one row times the scales [kStepKeys] of their keys.
inline void scale_row(const float* scales, float* scores) {
  for (int i = 0; i < kStepKeys; i += kLanes) {
    store(scores + i, mul(load(scores + i), load(scales + i)));
  }
}

// Scores of a step to the weights of its values, for rows [row_begin, row_end), and the factors by
// which their sums so far are to be multiplied. Scores are multiplied by `scale` first.
template <typename T>
inline void weigh_step(const DecodeParams& p, const Rows& rows, const RowState& state,
                       int64_t row_begin, int64_t row_end, int64_t key_begin, const Step<T>& step,
                       float scale, float* rescale) {
  const bool adjusted = p.softcap != 0.0f || p.alibi_slopes != nullptr;
  for (int64_t row = row_begin; row < row_end; ++row) {
    float* scores = state.scores + row * kStepKeys;
    if constexpr (kIsScaled<T>) scale_row(step.k_scale, scores);
    if (scale != 1.0f) {
      for (int i = 0; i < kStepKeys; i += kLanes) {
        store(scores + i, mul(load(scores + i), broadcast(scale)));
      }
    }
    if (adjusted) adjust_scores(p, rows, row, key_begin, scores);
    rescale[row] = softmax_row(step.count, scores, state.max[row], state.sum[row]);
    if constexpr (kIsScaled<T>) scale_row(step.v_scale, scores);
  }
}
