// SPDX-License-Identifier: BSD-3-Clause
#if defined(__aarch64__)

// Every AArch64 has NEON: the compiler need not be told of it.
#define TREE_ATTENTION_SIMD "cpu/vector/simd_neon.h"
#include "cpu/vector/in_order.h"
#include "cpu/vector/kernels.h"

namespace tree_attention::cpu {
namespace {

inline size_t few_rows_bytes(const DecodeParams& p, int64_t num_rows) {
  return row_state_bytes(p, num_rows);
}

inline void attend_in_order(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                            float* o, float* lse) {
  with_kv_dtype(p.kv_dtype,
                [&]<typename T>() { InOrderAttention<T>(p, rows, workspace).run(keys, o, lse); });
}

}  // namespace

constinit const Kernels neon_kernels = {"neon",         Vectors::kNeon,  max_few_rows,
                                        few_rows_bytes, attend_in_order, store_output};
}  // namespace tree_attention::cpu

#endif
