// SPDX-License-Identifier: BSD-3-Clause
//
// Known answers of the tiles that stand for AMX (tests/amx_emulator/amx.h), and what the kernels on
// them fetch ahead.
#include "check.h"

#if defined(__x86_64__)
#include <cfenv>
#include <cmath>
#include <set>
#include <string>

#include "cpu/decode.h"
#include "decode_case.h"
#include "tests/amx_emulator/amx.h"

namespace {

namespace amx = amx_emulator;

struct Config {
  unsigned char bytes[64] = {1};

  Config& shape(int tile, int num_rows, int row_bytes) {
    bytes[16 + 2 * tile] = static_cast<unsigned char>(row_bytes);
    bytes[48 + tile] = static_cast<unsigned char>(num_rows);
    return *this;
  }
};

uint16_t bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  CHECK((bits & 0xffff) == 0, x, " is no bfloat16");
  return static_cast<uint16_t>(bits >> 16);
}

// c + the products of two pairs a and b, of one row and one column.
struct Pairs {
  float a[4], b[4], c;
};
float product(const Pairs& pairs) {
  uint16_t a[4], b[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = bfloat16(pairs.a[i]);
    b[i] = bfloat16(pairs.b[i]);
  }
  Config config;
  config.shape(0, 1, 4).shape(1, 1, 8).shape(2, 2, 4);
  amx::load_config(config.bytes);
  float c = pairs.c;
  amx::load(0, &c, 4);
  amx::load(1, a, 8);
  amx::load(2, b, 4);
  amx::multiply_bfloat16(0, 1, 2);
  amx::store(0, &c, 4);
  return c;
}

void check_product(const char* what, const Pairs& pairs, float expected) {
  const float got = product(pairs);
  CHECK(std::isnan(expected) ? std::isnan(got)
                             : got == expected && std::signbit(got) == std::signbit(expected),
        what, ": ", got, ", not ", expected);
}

template <typename Body>
void check_throws(const char* message, const Body& body) {
  std::string got = "nothing";
  try {
    body();
  } catch (const std::logic_error& error) {
    got = error.what();
  }
  CHECK(got.find(message) != std::string::npos, "expected: ", message, "; got: ", got);
}

}  // namespace

void test_amx_products() {
  if (!__builtin_cpu_supports("avx512f")) return;
  const float large = 1 << 24;  // to which 1 is added in vain
  check_product("pairs", {{1, 2, 3, 4}, {5, 6, 7, 8}, 9}, 79);
  check_product("first elements, second elements", {{large, 1, 1, 1}, {1, 1, 1, 1}, 0}, large + 2);
  check_product("the sum so far comes last", {{1, 0, 1, 0}, {1, 0, 1, 0}, large}, large + 2);
  check_product("ties go to even", {{1, 0, 0, 0}, {1, 0, 0, 0}, large + 2}, large + 4);
  std::fesetround(FE_UPWARD);
  check_product("whatever the thread rounds to", {{1, 0, 0, 0}, {1, 0, 0, 0}, large}, large);
  CHECK(std::fegetround() == FE_UPWARD, "the rounding of the thread has changed");
  std::fesetround(FE_TONEAREST);
  check_product("a subnormal factor", {{0x1p-130f, 0, 0, 0}, {0x1p60f, 0, 0, 0}, 0}, 0);
  check_product("a subnormal product", {{0x1p-70f, 0, 0, 0}, {0x1p-70f, 0, 0, 0}, 0}, 0);
  check_product("a subnormal sum so far", {{}, {}, -0x1p-130f}, 0);
  check_product("products are not rounded",
                {{0x1p100f, 0, -0x1p100f, 0}, {0x1p28f, 0, 0x1p27f, 0}, 0}, INFINITY);
  check_product("infinity times 0", {{INFINITY, 0, 0, 0}, {}, 0}, NAN);

  // Each element of a tile: rows of a, columns of b.
  Config config;
  config.shape(0, 3, 12).shape(1, 3, 64).shape(2, 16, 12);
  amx::load_config(config.bytes);
  uint16_t a[3][32], b[16][6];
  for (int i = 0; i < 32; ++i) {
    for (int row = 0; row < 3; ++row) a[row][i] = bfloat16(row + i);
    for (int column = 0; column < 3; ++column) b[i / 2][2 * column + i % 2] = bfloat16(column * i);
  }
  float sums[3][4];
  for (auto& row : sums) std::fill(row, row + 4, -1.0f);
  amx::zero(0);
  amx::load(1, a, sizeof(a[0]));
  amx::load(2, b, sizeof(b[0]));
  amx::multiply_bfloat16(0, 1, 2);
  amx::store(0, sums, sizeof(sums[0]));
  for (int row = 0; row < 3; ++row) {
    for (int column = 0; column < 3; ++column) {
      const int expected = column * (row * 496 + 10416);  // of the sums of i and of i * i
      CHECK(sums[row][column] == expected, row, ", ", column, ": ", sums[row][column]);
    }
    CHECK(sums[row][3] == -1.0f, "the store of row ", row, " was too wide");
  }

  // Bytes with signs, four to a sum.
  config.shape(0, 1, 8).shape(1, 1, 8).shape(2, 2, 8);
  amx::load_config(config.bytes);
  const signed char bytes_a[8] = {-128, 127, 1, 2, 3, 4, 5, -6};
  const signed char bytes_b[2][8] = {{-128, -128, 1, 2, 0, 0, 0, 1}, {3, 4, 5, 6, 0, 0, 0, -2}};
  int32_t words[2] = {1000, INT32_MAX};
  amx::load(0, words, 8);
  amx::load(1, bytes_a, 8);
  amx::load(2, bytes_b, 8);
  amx::multiply_bytes(0, 1, 2);
  amx::store(0, words, 8);
  CHECK(words[0] == 1000 + 16384 - 16256 + 1 + 4 + 9 + 16 + 25 - 36, words[0]);
  CHECK(words[1] == INT32_MIN + 13, "sums wrap, ", words[1]);
  amx::release();
}

void test_amx_exceptions() {
  amx::release();
  check_throws("not configured", [] { amx::zero(3); });
  Config config;
  config.shape(0, 4, 64).shape(1, 4, 32).shape(2, 8, 64).shape(3, 4, 60).shape(4, 4, 30);
  amx::load_config(config.bytes);
  check_throws("must differ", [] { amx::multiply_bfloat16(0, 1, 1); });
  check_throws("do not match", [] { amx::multiply_bfloat16(3, 1, 2); });
  check_throws("whole words", [] { amx::multiply_bytes(0, 4, 2); });
  check_throws("not configured", [] { amx::multiply_bytes(0, 1, 5); });
  const auto check_config = [](const char* message, int place, unsigned char byte) {
    Config wrong;
    wrong.bytes[place] = byte;
    check_throws(message, [&] { amx::load_config(wrong.bytes); });
  };
  check_config("palette must be 1", 0, 2);
  check_config("reserved bytes must be 0", 15, 1);
  check_config("16 rows of 64 bytes at most", 48, 17);
  check_config("16 rows of 64 bytes at most", 16, 65);
  check_config("rows without bytes", 48, 16);
  amx::release();
}

// While few rows meet a step of 32 keys, the next one is fetched: all values, and the keys that are
// used where they lie.
void test_amx_fetching() {
  using namespace tree_attention;
  try {
    cpu::set_instruction_set("amx");
  } catch (const std::invalid_argument&) {
    return;  // this processor has no products of pairs
  }
  for (const DataType kv_dtype : {DataType::kBFloat16, DataType::kInt8, DataType::kFloat8}) {
    for (const int num_rows : {1, 4, 8}) {
      constexpr int kKeys = 300, kDims = 128;
      testing::Shape shape{1, 1, num_rows, 1, kKeys, kDims, kDims, DataType::kBFloat16};
      if (kv_dtype != shape.dtype) shape.kv_dtype = kv_dtype;
      testing::DecodeCase decode(shape, num_rows);
      const DecodeParams params = decode.params(1);
      std::set<uintptr_t> lines;
      amx::fetched_lines = &lines;
      cpu::lean_decode(params);
      amx::fetched_lines = nullptr;
      const int row_bytes = kDims * element_size(kv_dtype);
      const auto count_missing = [&](const void* rows) {
        int missing = 0;
        for (int key = 32; key < kKeys; ++key) {
          for (int byte = 0; byte < row_bytes; byte += 64) {
            const auto address = reinterpret_cast<uintptr_t>(rows) + key * row_bytes + byte;
            missing += !lines.contains(address / 64);
          }
        }
        return missing;
      };
      const int keys = kv_dtype == DataType::kFloat8 ? 0 : count_missing(params.k);
      const int values = count_missing(params.v);
      CHECK(keys == 0 && values == 0, num_rows, " rows, dtype ", static_cast<int>(kv_dtype), ": ",
            keys, " lines of keys and ", values, " of values were not fetched");
    }
  }
}

#else
void test_amx_products() {}
void test_amx_exceptions() {}
void test_amx_fetching() {}
#endif
