// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels of an instruction set that has vectors and no matrices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/kernels.h"
#include "cpu/vector/attention.h"
#include "cpu/vector/output.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/weight_rows.h"

namespace tree_attention::cpu {
namespace {

inline int64_t max_rows(const DecodeParams&) { return kMaxRows; }

inline void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                   float* o, float* lse) {
  with_kv_dtype(p.kv_dtype,
                [&]<typename T>() { VectorAttention<T>(p, rows, workspace).run(keys, o, lse); });
}

constexpr Kernels vector_kernels(const char* name) {
  return {name, max_rows, row_state_bytes, attend, store_output, multiply_weight_rows};
}

}  // namespace
}  // namespace tree_attention::cpu
