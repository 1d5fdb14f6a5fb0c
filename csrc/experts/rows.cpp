// SPDX-License-Identifier: BSD-3-Clause
#include "experts/rows.h"

#include <stdexcept>

#include "cpu/kernels.h"

namespace tree_attention::cpu {

MultiplyRows rows_multiplied_by(Vectors vectors) {
  switch (vectors) {
#if defined(__x86_64__)
    case Vectors::kAvx2:
      return multiply_rows_avx2;
    case Vectors::kAvx512:
      return multiply_rows_avx512;
    case Vectors::kAvx512Bf16:
      return multiply_rows_avx512_bf16;
#elif defined(__aarch64__)
    case Vectors::kNeon:
      return multiply_rows_neon;
#endif
    case Vectors::kPortable:
      return multiply_rows_portable;
  }
  throw std::logic_error("rows_multiplied_by: no kernel for these vectors");
}

void multiply_rows(const WeightRows& w) { rows_multiplied_by(kernels().vectors)(w); }

}  // namespace tree_attention::cpu
