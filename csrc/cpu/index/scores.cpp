// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/index/scores.h"

#include <stdexcept>

#include "cpu/kernels.h"

namespace tree_attention::cpu {

const ScoreKernels& scores_by(Vectors vectors) {
  switch (vectors) {
#if defined(__x86_64__)
    case Vectors::kAvx2:
      return avx2_scores;
    case Vectors::kAvx512:
      return avx512_scores;
    case Vectors::kAvx512Bf16:
      return avx512_bf16_scores;
#elif defined(__aarch64__)
    case Vectors::kNeon:
      return neon_scores;
#endif
    case Vectors::kPortable:
      return portable_scores;
  }
  throw std::logic_error("scores_by: no kernel for these vectors");
}

}  // namespace tree_attention::cpu
