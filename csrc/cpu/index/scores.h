// SPDX-License-Identifier: BSD-3-Clause
//
// The scores of an index, by each instruction set. The bits of a score depend on the query, its
// weights and the key alone: not on the key's place in a tile, nor on how many there are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace tree_attention::cpu {

enum class Vectors;

// The heads of one query token.
struct IndexHeads {
  DataType dtype;
  int64_t num_heads, head_dim;
  const void* q;         // [num_heads, head_dim]
  int64_t q_stride;      // in elements
  const float* weights;  // [num_heads]; null: a score for each head
  float scale;
  int64_t num_all_heads;  // of the call: how it is cut must not change the order of sums
};

struct ScoreTile {
  static constexpr int kKeys = 64, kAhead = 16;

  int count;
  // The addresses of keys, of the dtype of q. After the first `count` come keys of the next tile,
  // as far as there are any, and then the last key again: these may be read and fetched.
  const void* keys[kKeys + kAhead];
};

struct ScoreKernels {
  // Bytes of a prepared query token, and of scratch memory; both aligned to 64.
  size_t (*query_bytes)(const IndexHeads& heads);
  size_t (*scratch_bytes)(const IndexHeads& heads);

  void (*prepare)(const IndexHeads& heads, void* query);

  // scores [1 or num_heads, kKeys]: sum over heads of weight * relu(scale * product), or scale *
  // product.
  void (*score)(const IndexHeads& heads, const void* query, const ScoreTile& tile, void* scratch,
                float* scores);
};

extern const ScoreKernels portable_scores;
#if defined(__x86_64__)
extern const ScoreKernels avx2_scores, avx512_scores, avx512_bf16_scores;
#elif defined(__aarch64__)
extern const ScoreKernels neon_scores;
#endif

const ScoreKernels& scores_by(Vectors vectors);

}  // namespace tree_attention::cpu
