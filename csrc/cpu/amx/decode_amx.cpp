// SPDX-License-Identifier: BSD-3-Clause
#if defined(__x86_64__)

#include "cpu/vector/before_target.h"

#include "cpu/targets/amx.h"

#define TREE_ATTENTION_SIMD "cpu/vector/simd_avx512.h"
#include "cpu/amx/few_rows.h"
#include "cpu/amx/many_rows.h"
#include "cpu/bf16/kernels.h"

namespace tree_attention::cpu {
namespace {

struct FewRowsByTiles {
  static size_t bytes(const DecodeParams& p, int64_t num_rows) {
    return row_state_bytes(p, num_rows) +
           (p.dtype == DataType::kBFloat16 ? FewRowsMemory(p, num_rows, nullptr).num_bytes : 0);
  }

  template <typename T>
  static void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                     float* o, float* lse) {
    if constexpr (kIsBfloat16<T>) {
      if (p.dtype == DataType::kBFloat16) {
        TileAttention<T>(p, rows, workspace).run(keys, o, lse);
        return;
      }
    }
    avx512_kernels.attend(p, rows, keys, workspace, o, lse);
  }
};

}  // namespace
}  // namespace tree_attention::cpu

#include "cpu/targets/end.h"

namespace tree_attention::cpu {
constinit const Kernels amx_kernels =
    Bfloat16Kernels<FewRowsByTiles, TileRowsMemory, TileRowsAttention>::named("amx",
                                                                              Vectors::kAvx512Bf16);
}

#endif
