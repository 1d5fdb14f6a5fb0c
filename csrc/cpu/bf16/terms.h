// SPDX-License-Identifier: BSD-3-Clause
//
// Which calls products of bfloat16 take, and with how many terms a weight.
#pragma once

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/vector/in_order.h"
#include "cpu/vector/keys.h"

namespace tree_attention::cpu {
namespace {

// Whether products of bfloat16 take keys of type T: keys of 8 bits are exact in bfloat16.
template <typename T>
constexpr bool kIsBfloat16 = kIsScaled<T> || __is_same(T, BFloat16);

// A weight rounded to one bfloat16 is off by 2^-9 at most, no more than a result in bfloat16 is.
// Where the result keeps more digits, weights are two terms, off by 2^-17.
inline bool weights_need_two_terms(const DecodeParams& p) {
  return p.result_dtype != DataType::kBFloat16;
}

// Kernels::attend of few rows with keys of type T: Products<T>, where they take the call and find
// no NaN that may be their own, else products of float32.
template <template <typename> typename Products, typename T>
inline void attend_few_rows(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                            float* o, float* lse) {
  if constexpr (kIsBfloat16<T>) {
    if (p.dtype == DataType::kBFloat16 && Products<T>(p, rows, workspace).run(keys, o, lse)) return;
  }
  InOrderAttention<T>(p, rows, workspace).run(keys, o, lse);
}

}  // namespace
}  // namespace tree_attention::cpu
