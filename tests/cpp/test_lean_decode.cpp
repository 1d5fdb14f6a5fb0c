// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/decode.h"
#include "decode_case.h"
#include "instruction_sets.h"

namespace {

using tree_attention::DataType;
using tree_attention::testing::DecodeCase;
using tree_attention::testing::instruction_sets;
using tree_attention::testing::Shape;
namespace cpu = tree_attention::cpu;

constexpr DataType kFloat32 = DataType::kFloat32, kBFloat16 = DataType::kBFloat16,
                   kFloat16 = DataType::kFloat16;

// Whose keys of 8 bits the instruction sets convert in ways of their own. Batch, kv heads, group,
// seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, page, alibi, cap, ranges, dtype of keys
const std::vector<Shape> kShapesOf8Bits = {
    {1, 2, 4, 1, 130, 96, 64, kBFloat16, 0, false, 0.0f, false, DataType::kInt8},
    {1, 1, 8, 1, 96, 64, 32, kBFloat16, 16, false, 0.0f, true, DataType::kInt8},
    {1, 1, 4, 5, 100, 64, 64, kBFloat16, 0, false, 0.0f, true, DataType::kFloat8},
    {1, 1, 4, 20, 300, 32, 96, kBFloat16, 0, false, 0.0f, true, DataType::kInt8},
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

void test_lean_decode() {
  const std::vector<std::string> names = instruction_sets();
  CHECK(!names.empty(), "no instruction set");
  std::vector<Shape> shapes = tree_attention::testing::shapes();
  shapes.insert(shapes.end(), kShapesOf8Bits.begin(), kShapesOf8Bits.end());
  for (const std::string& name : names) std::printf("%s ", name.c_str());
  for (size_t seed = 0; seed < shapes.size(); ++seed) {
    DecodeCase decode(shapes[seed], static_cast<int>(seed));
    for (const std::string& name : names) {
      cpu::set_instruction_set(name);
      for (int workers : {0, 1, 2, 3, 7, 16}) {
        std::vector<float> o, lse;
        for (int threads : {1, 5}) {
          at::set_num_threads(threads);
          try {
            decode.check(workers, cpu::lean_decode);
          } catch (const std::runtime_error& error) {
            CHECK(false, name, ", shape ", seed, ", ", workers, " workers, ", threads,
                  " threads: ", error.what());
          }
          if (workers > 0 && threads > 1) {
            CHECK(same_bits(o, decode.o()) && same_bits(lse, decode.lse()), name, ", ", workers,
                  " workers: bits depend on the number of threads");
          }
          o = decode.o();
          lse = decode.lse();
        }
      }
    }
  }
}

// So many workers on one output that they are merged in two and three levels.
void test_many_workers() {
  DecodeCase decode({2, 1, 2, 1, 45000, 8, 8, kFloat32}, 0);
  for (int workers : {90, 500, 1400}) {
    std::vector<float> o, lse;
    for (int threads : {1, 5, 16}) {
      at::set_num_threads(threads);
      decode.check(workers, cpu::lean_decode);
      CHECK(threads == 1 || (same_bits(o, decode.o()) && same_bits(lse, decode.lse())), workers,
            " workers: bits depend on the number of threads");
      o = decode.o();
      lse = decode.lse();
    }
  }
}

void test_page_out_of_range() {
  DecodeCase decode({1, 1, 1, 1, 64, 16, 16, kFloat32, 16}, 0);
  decode.page_table()[2] = 5;
  try {
    cpu::lean_decode(decode.params(2));
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find("page_table") != std::string::npos, error.what());
    return;
  }
  CHECK(false, "page 5 of 5 was accepted");
}

// Calls from several threads at once, each with its own inputs, as a server makes them.
void test_concurrent_calls() {
  at::set_num_threads(2);
  std::vector<std::thread> callers;
  std::vector<std::string> errors(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([caller, &errors] {
      try {
        DecodeCase decode({2, 2, 4, 1, 300 + 100 * caller, 64, 64, kBFloat16}, caller);
        for (int repeat = 0; repeat < 20; ++repeat) decode.check(repeat % 5, cpu::lean_decode);
      } catch (const std::exception& error) {
        errors[caller] = error.what();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::string& error : errors) CHECK(error.empty(), error);
}
