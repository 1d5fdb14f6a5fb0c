// SPDX-License-Identifier: BSD-3-Clause
#include "experts/rows.h"

#include "cpu/kernels.h"

namespace tree_attention::cpu {

void multiply_rows(const WeightRows& w) {
#if defined(__x86_64__)
  const Kernels* const used = &kernels();
  if (used == &amx_kernels || used == &avx512_bf16_kernels) return multiply_rows_avx512_bf16(w);
  if (used == &avx512_kernels) return multiply_rows_avx512(w);
  if (used == &avx2_kernels) return multiply_rows_avx2(w);
#elif defined(__aarch64__)
  if (&kernels() != &portable_kernels) return multiply_rows_neon(w);
#endif
  multiply_rows_portable(w);
}

}  // namespace tree_attention::cpu
