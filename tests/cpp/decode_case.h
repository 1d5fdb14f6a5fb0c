// SPDX-License-Identifier: BSD-3-Clause
//
// One call of lean_decode with its buffers, each allocated to the exact size so that a sanitizer
// sees the first element beyond, and its float64 reference. Keys that no query sees are NaN, or
// where they have 8 bits their scales.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/decode_params.h"

namespace tree_attention::testing {

struct Shape {
  int batch, heads_kv, group_size, seqlen_q, seqlen_k, head_dim, head_dim_v;
  DataType dtype;
  int page_size = 0;  // divides seqlen_k; 0: not paged
  bool alibi = false;
  float softcap = 0.0f;
  bool ranges = false;
  std::optional<DataType> kv_dtype = {};  // of 8 bits, with scales; else that of the queries
  bool nan = false;  // in one float8 key and in the scale of a value, of the first head
  int gap = 0;       // elements between the rows of queries, keys and values, NaN if they can be
  bool latents = false;  // values are the first columns of the keys
  int window =
      0;  // tokens, the last ones of their sequence, see so many keys up to their own; 0: all

  DataType cached() const { return kv_dtype.value_or(dtype); }
};

// The cases of every backend; head_dim and head_dim_v may be any number.
const std::vector<Shape>& shapes();

class DecodeCase {
 public:
  DecodeCase(const Shape& shape, int seed);

  // Runs a backend's lean_decode with fresh outputs and compares with the reference. o may be off
  // by `tolerance`, by default as much as any backend is.
  void check(int num_workers, const std::function<void(const DecodeParams&)>& lean_decode,
             std::optional<double> tolerance = {});

  // Bits of the outputs of the last run.
  const std::vector<float>& o() const { return o_; }
  const std::vector<float>& lse() const { return lse_; }

  DecodeParams params(int num_workers);
  std::vector<int32_t>& page_table() { return page_table_; }

 private:
  using Bytes = std::vector<unsigned char>;

  int64_t row_of_key(int batch, int head, int key) const;
  int64_t scale_of_row(int64_t row) const;
  int64_t value_stride() const;
  void compute_reference();

  Shape shape_;
  Bytes q_, k_, v_;
  std::vector<float> k_scale_, v_scale_;  // [batch, key, head], or [page, slot, head]
  std::vector<int32_t> ranges_, page_table_;
  std::vector<float> slopes_;
  std::vector<int64_t> positions_;
  std::vector<float> o_, lse_;
  std::vector<double> o_reference_, lse_reference_;
};

}  // namespace tree_attention::testing
