// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include "cpu/vector/before_target.h"

#include "cpu/targets/avx512_bf16.h"

#define TREE_ATTENTION_SIMD "cpu/vector/simd_avx512.h"
#include "cpu/bf16/few_rows.h"
#include "cpu/bf16/kernels.h"
#include "cpu/bf16/many_rows.h"
#include "cpu/bf16/terms.h"

namespace tree_attention::cpu {
namespace {

struct FewRowsByPairs {
  static size_t bytes(const DecodeParams& p, int64_t num_rows) {
    return PairAttention<BFloat16>::workspace_bytes(p, num_rows);
  }

  template <typename T>
  static void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                     float* o, float* lse) {
    attend_few_rows<PairAttention, T>(p, rows, keys, workspace, o, lse);
  }
};

}  // namespace
}  // namespace tree_attention::cpu

#include "cpu/targets/end.h"

namespace tree_attention::cpu {
constinit const Kernels avx512_bf16_kernels =
    Bfloat16Kernels<FewRowsByPairs, PairRowsMemory, PairRowsAttention>::named("avx512_bf16",
                                                                              Vectors::kAvx512Bf16);
}

#endif
