// SPDX-License-Identifier: BSD-3-Clause
//
// decode_step INSTRUCTION_SET DTYPE KV_DTYPE KEYS CALLS: decoding steps of 32 query heads and 8
// key/value heads of 128 dims on one thread, for a count of instructions. DataTypes are numbers.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "common/decode_params.h"
#include "cpu/decode.h"

namespace {

using tree_attention::DataType;
using tree_attention::DecodeParams;

constexpr int64_t kHeads = 32, kHeadsKv = 8, kDim = 128;

// Small numbers: none is a NaN, in any dtype.
std::vector<unsigned char> numbers(int64_t count, DataType dtype) {
  std::vector<unsigned char> bytes(count * element_size(dtype));
  uint32_t random = 1;
  for (size_t i = 0; i < bytes.size(); ++i) {
    random = random * 1664525u + 1013904223u;
    const bool is_last = (i + 1) % element_size(dtype) == 0;  // with the sign and the exponent
    bytes[i] = is_last && element_size(dtype) > 1 ? 0x30 | (random >> 31 << 7) : random >> 28;
  }
  return bytes;
}

void set(int64_t* stride, int64_t heads, int64_t tokens, int64_t width) {
  stride[0] = heads * tokens * width;
  stride[1] = tokens * width;
  stride[2] = width;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  tree_attention::cpu::set_instruction_set(argv[1]);
  DecodeParams p{};
  p.dtype = p.out_dtype = static_cast<DataType>(std::atoi(argv[2]));
  p.kv_dtype = static_cast<DataType>(std::atoi(argv[3]));
  p.seqlen_k = std::atoi(argv[4]);
  const std::vector<unsigned char> q = numbers(kHeads * kDim, p.dtype);
  const std::vector<unsigned char> kv = numbers(kHeadsKv * p.seqlen_k * kDim, p.kv_dtype);
  const std::vector<float> scale(kHeadsKv * p.seqlen_k, 0.01f);
  std::vector<float> o(kHeads * kDim), lse(kHeads);
  p.q = q.data();
  p.k = p.v = kv.data();
  p.o = o.data();
  p.lse = lse.data();
  set(p.q_stride, kHeads, 1, kDim);
  set(p.k_stride, kHeadsKv, p.seqlen_k, kDim);
  set(p.v_stride, kHeadsKv, p.seqlen_k, kDim);
  set(p.o_stride, kHeads, 1, kDim);
  set(p.lse_stride, kHeads, 1, 1);
  if (element_size(p.kv_dtype) == 1) {
    p.k_scale = p.v_scale = scale.data();
    set(p.k_scale_stride, kHeadsKv, p.seqlen_k, 1);
    set(p.v_scale_stride, kHeadsKv, p.seqlen_k, 1);
  }
  p.softmax_scale = 0.1f;
  p.key_layout = {0, 1, 1};
  p.batch = p.seqlen_q = p.num_workers = 1;
  p.num_heads_q = kHeads;
  p.num_heads_kv = kHeadsKv;
  p.head_dim = p.head_dim_v = kDim;
  for (int call = 0; call < std::atoi(argv[5]); ++call) tree_attention::cpu::lean_decode(p);
  return o[0] == o[0] ? 0 : 1;
}
