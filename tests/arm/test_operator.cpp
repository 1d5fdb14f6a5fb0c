// SPDX-License-Identifier: BSD-3-Clause
//
// lean_decode at the instruction set that the first argument names, on random calls of all kinds,
// against float64. Without an argument, the names of the instruction sets that this CPU has.
#include <ATen/Parallel.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/decode.h"
#include "decode_case.h"

namespace {

using tree_attention::DataType;
using tree_attention::DecodeParams;
using tree_attention::testing::DecodeCase;
using tree_attention::testing::Shape;
namespace cpu = tree_attention::cpu;

constexpr int kCalls = 250;

// A call with o in bfloat16, which is put where the caller expects float32.
void decode_to_bfloat16(const DecodeParams& p) {
  const int64_t size = p.batch * p.o_stride[0];
  std::vector<uint16_t> o(size, 0x7fc0);
  DecodeParams rounded = p;
  rounded.o = o.data();
  rounded.out_dtype = DataType::kBFloat16;
  cpu::lean_decode(rounded);
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = static_cast<uint32_t>(o[i]) << 16;
    std::memcpy(static_cast<float*>(p.o) + i, &bits, sizeof(bits));
  }
}

Shape random_shape(std::mt19937& random) {
  const auto one_of = [&](std::initializer_list<int> values) {
    return values.begin()[random() % values.size()];
  };
  Shape s{};
  s.batch = one_of({1, 2});
  s.heads_kv = one_of({1, 2});
  s.group_size = one_of({1, 2, 3, 4, 5, 8});
  s.seqlen_q = one_of({1, 1, 2, 5, 12});
  s.seqlen_k = one_of({1, 3, 31, 64, 97, 160, 333});
  s.head_dim = one_of({1, 7, 16, 24, 40, 64, 65, 128});
  s.head_dim_v = random() % 2 == 0 ? s.head_dim : one_of({3, 8, 20, 32, 64, 96});
  s.dtype = static_cast<DataType>(random() % 3);
  if (random() % 2 == 0) s.kv_dtype = random() % 2 == 0 ? DataType::kInt8 : DataType::kFloat8;
  if (random() % 3 == 0) {
    s.page_size = one_of({1, 16, 24});
    s.seqlen_k = (s.seqlen_k + s.page_size - 1) / s.page_size * s.page_size;
  }
  s.alibi = random() % 4 == 0;
  s.softcap = random() % 4 == 0 ? 5.0f : 0.0f;
  s.ranges = random() % 2 == 0;
  s.gap = random() % 2 == 0 ? one_of({1, 8}) : 0;
  return s;
}

void check_name(const std::string& name) {
  std::mt19937 random(1);
  int rounded_calls = 0;
  for (int call = 0; call < kCalls; ++call) {
    const Shape shape = random_shape(random);
    const int workers = static_cast<int>(random() % 5);
    DecodeCase decode(shape, call);
    cpu::set_instruction_set(name);
    try {
      decode.check(workers, cpu::lean_decode, 3e-5);
      if (shape.dtype == DataType::kBFloat16) {  // and one term a weight: both round by up to 2^-9
        ++rounded_calls;
        decode.check(workers, decode_to_bfloat16, 2e-2);
      }
    } catch (const std::runtime_error& error) {
      CHECK(false, name, ", call ", call, ": ", error.what());
    }
  }
  CHECK(rounded_calls > kCalls / 5, rounded_calls, " calls with o in bfloat16");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    at::set_num_threads(2);
    cpu::set_instruction_set(argc > 1 ? argv[1] : "none");
    check_name(argv[1]);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  std::printf("%d calls\n", kCalls);
  return 0;
}
