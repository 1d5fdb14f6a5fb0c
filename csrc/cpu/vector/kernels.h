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
#include "cpu/vector/key_blocks.h"
#include "cpu/vector/many_rows.h"
#include "cpu/vector/output.h"
#include "cpu/vector/row_state.h"

namespace tree_attention::cpu {
namespace {

struct VectorKernels {
  static int64_t max_rows(const DecodeParams& p) {
    return LaneRowsMemory::supports(p) ? kManyRows : kMaxRows;
  }

  static size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
    const size_t few_bytes = row_state_bytes(p, num_rows < kMaxRows ? num_rows : kMaxRows);
    const size_t many_bytes = LaneRowsMemory::supports(p) ? LaneRowsMemory::bytes(p, num_rows) : 0;
    return few_bytes > many_bytes ? few_bytes : many_bytes;
  }

  static void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                     float* o, float* lse) {
    with_kv_dtype(p.kv_dtype, [&]<typename T>() {
      if (LaneRowsMemory::is_profitable(p, rows) &&
          LaneRowsAttention<T>(p, rows, keys, workspace).run(o, lse))
        return;
      for_parts(rows, kMaxRows, [&](const Rows& part, int64_t row) {
        VectorAttention<T>(p, part, workspace).run(keys, o + row * p.head_dim_v, lse + row);
      });
    });
  }

  static constexpr Kernels named(const char* name, Vectors vectors) {
    return {name, vectors, max_rows, workspace_bytes, attend, store_output};
  }
};

}  // namespace
}  // namespace tree_attention::cpu
