// SPDX-License-Identifier: BSD-3-Clause
//
// Which calls products of bfloat16 take, and with how many terms a weight.
#pragma once

#include "common/decode_params.h"
#include "common/dtype.h"
#include "cpu/vector/keys.h"

namespace tree_attention::cpu {
namespace {

// Whether they take keys of type T: those of 8 bits are exact in bfloat16.
template <typename T>
constexpr bool kIsBfloat16 = kIsScaled<T> || __is_same(T, BFloat16);

// A weight rounded to one bfloat16 is off by 2^-9 at most, no more than o in bfloat16 is. Where o
// keeps more digits, weights are two terms, off by 2^-17.
inline bool weights_need_two_terms(const DecodeParams& p) {
  return p.out_dtype != DataType::kBFloat16;
}

}  // namespace
}  // namespace tree_attention::cpu
