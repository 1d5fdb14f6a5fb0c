// SPDX-License-Identifier: BSD-3-Clause
//
// Kernels::store: complete states of rows to the tensors of a call.
#pragma once

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

template <typename T>
inline void store_rows(const DecodeParams& p, const Rows& rows, const float* o, const float* lse) {
  for (int64_t row = 0; row < rows.count; ++row, o += p.head_dim_v) {
    const auto [token, head] = place_of_row(p, rows, row);
    T* out = static_cast<T*>(p.o) + rows.batch * p.o_stride[0] + head * p.o_stride[1] +
             token * p.o_stride[2];
    int64_t d = 0;
    for (; d + kLanes <= p.head_dim_v; d += kLanes) store_rounded(out + d, load(o + d));
    if (d < p.head_dim_v) {
      const int64_t rest = p.head_dim_v - d;
      float tail[kLanes] = {};
      T rounded[kLanes];
      __builtin_memcpy(tail, o + d, rest * sizeof(float));
      store_rounded(rounded, load(tail));
      __builtin_memcpy(out + d, rounded, rest * sizeof(T));
    }
    p.lse[rows.batch * p.lse_stride[0] + head * p.lse_stride[1] + token * p.lse_stride[2]] =
        lse[row];
  }
}

inline void store_output(const DecodeParams& p, const Rows& rows, const float* o,
                         const float* lse) {
  with_dtype(p.out_dtype, [&]<typename T>() { store_rows<T>(p, rows, o, lse); });
}

}  // namespace
}  // namespace tree_attention::cpu
