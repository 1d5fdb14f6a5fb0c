// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels of an instruction set that multiplies pairs of bfloat16, from its own
//   FewRows::bytes(p, num_rows), FewRows::attend<T>(...)   up to kMaxRows rows
//   Memory::supports(p), Memory::bytes(p, num_rows)        many rows: whether it takes them
//   ManyRows<T>(p, rows, keys, workspace).run(o, lse)      false: few rows at a time have to
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/bf16/column_softmax.h"
#include "cpu/bf16/terms.h"
#include "cpu/kernels.h"
#include "cpu/vector/key_blocks.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/many_rows_memory.h"
#include "cpu/vector/output.h"
#include "cpu/vector/row_state.h"

namespace tree_attention::cpu {
namespace {

template <typename FewRows, typename Memory, template <typename> typename ManyRows>
struct Bfloat16Kernels {
  // Many rows of other dtypes are attended with float32 products.
  static bool supports_lanes(const DecodeParams& p) {
    const bool is_other = p.dtype != DataType::kBFloat16 || p.kv_dtype == DataType::kFloat16 ||
                          p.kv_dtype == DataType::kFloat32;
    return is_other && LaneRowsMemory::supports(p);
  }

  static int64_t max_rows(const DecodeParams& p) {
    return Memory::supports(p) || supports_lanes(p) ? kManyRows : kMaxRows;
  }

  static size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
    const size_t few_bytes = FewRows::bytes(p, num_rows < kMaxRows ? num_rows : kMaxRows);
    const size_t many_bytes = Memory::supports(p) ? Memory::bytes(p, num_rows)
                              : supports_lanes(p) ? avx512_kernels.workspace_bytes(p, num_rows)
                                                  : 0;
    return few_bytes > many_bytes ? few_bytes : many_bytes;
  }

  static void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                     float* o, float* lse) {
    if (supports_lanes(p) && LaneRowsMemory::is_profitable(p, rows)) {
      avx512_kernels.attend(p, rows, keys, workspace, o, lse);
      return;
    }
    with_kv_dtype(p.kv_dtype, [&]<typename T>() {
      if constexpr (kIsBfloat16<T>) {
        if (Memory::supports(p) && ManyRows<T>(p, rows, keys, workspace).run(o, lse)) return;
      }
      for_parts(rows, kMaxRows, [&](const Rows& part, int64_t row) {
        FewRows::template attend<T>(p, part, keys, workspace, o + row * p.head_dim_v, lse + row);
      });
    });
  }

  static constexpr Kernels named(const char* name, Vectors vectors) {
    return {name, vectors, max_rows, workspace_bytes, attend, store_output};
  }
};

}  // namespace
}  // namespace tree_attention::cpu
