// SPDX-License-Identifier: BSD-3-Clause
#if defined(__aarch64__)

#include "cpu/vector/before_target.h"

#include "cpu/targets/neon_bf16.h"

#define TREE_ATTENTION_SIMD "cpu/vector/simd_neon.h"
#include "cpu/bf16/terms.h"
#include "cpu/neon/few_rows.h"
#include "cpu/vector/kernels.h"

namespace tree_attention::cpu {
namespace {

inline void attend_in_matrices(const DecodeParams& p, const Rows& rows, KeyRange keys,
                               void* workspace, float* o, float* lse) {
  with_kv_dtype(p.kv_dtype, [&]<typename T>() {
    attend_few_rows<MatrixAttention, T>(p, rows, keys, workspace, o, lse);
  });
}

}  // namespace
}  // namespace tree_attention::cpu

#include "cpu/targets/end.h"

namespace tree_attention::cpu {
constinit const Kernels neon_bf16_kernels = {
    "neon_bf16",        Vectors::kNeon, max_few_rows, MatrixAttention<BFloat16>::workspace_bytes,
    attend_in_matrices, store_output};
}

#endif
