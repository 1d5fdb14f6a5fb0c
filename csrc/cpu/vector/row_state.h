// SPDX-License-Identifier: BSD-3-Clause
//
// What a call knows of its rows, from their scaled queries to their partial state (o, lse).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/softmax.h"

namespace tree_attention::cpu {
namespace {

// Rows that share one pass over K and V.
constexpr int kMaxRows = 128;

// Kernels::max_rows of those who take no more.
inline int64_t max_few_rows(const DecodeParams&) { return kMaxRows; }

// Keys between two flushes.
constexpr int64_t kFlushKeys = 64 * kStepKeys;

constexpr int64_t kLine = kLineBytes / sizeof(float);  // of a cache line, where arrays begin

// The number of rows that instructions work on; rows beyond num_rows are computed and never used.
inline int64_t padded_rows(int64_t num_rows) { return (num_rows + kLine - 1) / kLine * kLine; }

// v_stride: see RowState.
inline size_t row_state_bytes(const DecodeParams& p, int64_t num_rows, int64_t v_stride) {
  return padded_rows(num_rows) * (padded(p.head_dim) + 2 * v_stride + kStepKeys + 4) *
         sizeof(float);
}
inline size_t row_state_bytes(const DecodeParams& p, int64_t num_rows) {
  return row_state_bytes(p, num_rows, padded(p.head_dim_v));
}

// The query of a row, of elements Q.
template <typename Q>
inline const Q* query_of_row(const DecodeParams& p, const Rows& rows, int64_t row) {
  const auto [token, head] = place_of_row(p, rows, row);
  return static_cast<const Q*>(p.q) + rows.batch * p.q_stride[0] + head * p.q_stride[1] +
         token * p.q_stride[2];
}

// out [padded(head_dim)] = the query of a row times score_scale, in the lane order of keys of type
// T.
template <typename T>
inline void load_query(const DecodeParams& p, const Rows& rows, int64_t row, float* out) {
  with_dtype(p.dtype, [&]<typename Q>() {
    const Vec scale = broadcast(score_scale(p));
    const Q* source = query_of_row<Q>(p, rows, row);
    for (int64_t d = 0; d < p.head_dim; d += kPair) {
      Vec a, b;
      if (d + kPair <= p.head_dim) {
        load_pair(source + d, a, b);
      } else {
        load_pair(source + d, static_cast<int>(p.head_dim - d), a, b);
      }
      if constexpr (kIsScaled<T>) to_memory_order(source, a, b);  // the order of values of 8 bits
      store(out + d, mul(a, scale));
      store(out + d + kLanes, mul(b, scale));
    }
  });
}

// out [head_dim_v], in the order of memory, = `factor` times sums [padded(head_dim_v)] in the lane
// order of values of type T.
template <typename T>
inline void store_scaled_sums(const DecodeParams& p, const float* sums, float factor, float* out) {
  for (int64_t d = 0; d < p.head_dim_v; d += kPair) {
    Vec a = mul(load(sums + d), broadcast(factor));
    Vec b = mul(load(sums + d + kLanes), broadcast(factor));
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

// Arrays of one call, in float32 and in the lane order of load_pair. Products of weights and values
// are summed in three levels: over a step, over up to kFlushKeys keys (acc) and over all keys
// (total). At 256k keys one chain of additions has ten times the rounding error of a blocked matrix
// product, three levels have less than it.
class RowState {
 public:
  // Cuts the workspace into the arrays, with rows of v_stride sums of values.
  RowState(const DecodeParams& p, const Rows& rows, void* workspace, int64_t v_stride)
      : stride(v_stride), p_(p), rows_(rows) {
    const int64_t num_rows = padded_rows(rows.count);
    q = static_cast<float*>(workspace);
    acc = q + num_rows * padded(p.head_dim);
    total = acc + num_rows * stride;
    scores = total + num_rows * stride;
    sum = reinterpret_cast<double*>(scores + num_rows * kStepKeys);
    base = reinterpret_cast<float*>(sum + num_rows);
    total_base = base + num_rows;
    end = reinterpret_cast<char*>(total_base + num_rows);
  }

  // The state of no keys, but for q.
  void clear() const {
    for (int64_t i = 0; i < rows_.count * stride; ++i) acc[i] = total[i] = 0.0f;
    for (int64_t row = 0; row < padded_rows(rows_.count); ++row) {
      base[row] = total_base[row] = -INFINITY;
      sum[row] = 0.0;
    }
  }

  // q = the rows' queries times score_scale, in the lane order of keys of type T.
  template <typename T>
  void load_queries() const {
    for (int64_t row = 0; row < rows_.count; ++row) {
      load_query<T>(p_, rows_, row, q + row * padded(p_.head_dim));
    }
  }

  // Adds the rows' sums since the last flush to their totals.
  void flush() const {
    for (int64_t row = 0; row < rows_.count; ++row) {
      const float new_base = base[row], old_base = total_base[row];
      const float change = new_base == old_base ? 1.0f : __builtin_exp2f(old_base - new_base);
      const Vec factor = broadcast(change);
      float *of_total = total + row * stride, *of_acc = acc + row * stride;
      for (int64_t d = 0; d < stride; d += kLanes) {
        store(of_total + d, fma(load(of_total + d), factor, load(of_acc + d)));
        store(of_acc + d, zero());
      }
      total_base[row] = new_base;
    }
  }

  // o [rows.count, head_dim_v] in the order of memory, from totals in the order in which values of
  // type T are summed, and lse [rows.count].
  template <typename T>
  void normalise(float* o, float* lse) const {
    for (int64_t row = 0; row < rows_.count; ++row) {
      const float of_row = static_cast<float>(sum[row]);
      const bool empty = of_row == 0.0f;
      lse[row] = lse_of(base[row], sum[row]);
      store_scaled_sums<T>(p_, total + row * stride, empty ? 0.0f : 1.0f / of_row,
                           o + row * p_.head_dim_v);
    }
  }

  const int64_t stride;  // head_dim_v or more
  float* q;              // [rows, padded(head_dim)], scaled by score_scale
  float* acc;            // [rows, stride], of the keys since the last flush
  float* total;          // [rows, stride], of the keys before it
  float* scores;         // [rows, kStepKeys]
  double* sum;           // [rows], of all weights
  float* base;           // [rows], what is subtracted from scores (softmax_row)
  float* total_base;     // [rows], the same up to the last flush
  char* end;             // of the arrays: where an instruction set with matrices keeps them

 private:
  const DecodeParams& p_;
  const Rows& rows_;
};

}  // namespace
}  // namespace tree_attention::cpu
