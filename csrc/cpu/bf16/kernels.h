// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels of an instruction set that multiplies pairs of bfloat16, from its own
//   FewRows::bytes(p, num_rows), FewRows::attend<T>(...)   up to kMaxRows rows
//   Memory::suits(p), Memory::bytes(p, num_rows)           many rows: whether it takes them
//   ManyRows<T>(p, rows, keys, workspace).run(o, lse)      false: few rows at a time have to
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/bf16/column_softmax.h"
#include "cpu/bf16/terms.h"
#include "cpu/bf16/weight_rows.h"
#include "cpu/kernels.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/output.h"
#include "cpu/vector/row_state.h"

namespace tree_attention::cpu {
namespace {

template <typename FewRows, typename Memory, template <typename> typename ManyRows>
struct Bfloat16Kernels {
  static int64_t max_rows(const DecodeParams& p) { return Memory::suits(p) ? kManyRows : kMaxRows; }

  static size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
    const size_t few_bytes = FewRows::bytes(p, num_rows < kMaxRows ? num_rows : kMaxRows);
    const size_t many_bytes = Memory::suits(p) ? Memory::bytes(p, num_rows) : 0;
    return few_bytes > many_bytes ? few_bytes : many_bytes;
  }

  static void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                     float* o, float* lse) {
    with_kv_dtype(p.kv_dtype, [&]<typename T>() {
      if constexpr (kIsBfloat16<T>) {
        if (Memory::suits(p) && ManyRows<T>(p, rows, keys, workspace).run(o, lse)) return;
      }
      for (int64_t row = 0; row < rows.count; row += kMaxRows) {
        const int64_t count = row + kMaxRows < rows.count ? kMaxRows : rows.count - row;
        const Rows part{rows.batch, rows.head_kv, rows.begin + row, count};
        FewRows::template attend<T>(p, part, keys, workspace, o + row * p.head_dim_v, lse + row);
      }
    });
  }

  static constexpr Kernels named(const char* name) {
    return {name, max_rows, workspace_bytes, attend, store_output, multiply_weight_rows_in_pairs};
  }
};

}  // namespace
}  // namespace tree_attention::cpu
