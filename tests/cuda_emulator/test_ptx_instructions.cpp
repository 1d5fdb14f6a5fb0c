// SPDX-License-Identifier: BSD-3-Clause
//
// The instructions that translated PTX consists of, by the definitions of the PTX ISA.
#include "ptx_instructions.h"

#include <climits>
#include <string>

#include "check.h"

namespace tree_attention::emulator::ptx {
namespace {

template <typename F>
void check_fails(F f, const std::string& message) {
  std::string text = "nothing";
  try {
    f();
  } catch (const Error& error) {
    text = error.what();
  }
  CHECK(text.find(message) != std::string::npos, text);
}

void test_integers() {
  CHECK(shl<u32>(3, 31) == 0x80000000 && shl<u32>(3, 32) == 0 && shl<u16>(1, 15) == 0x8000, "shl");
  CHECK(shl<u64>(1, 40) == u64{1} << 40 && shl<s32>(-1, 33) == 0, "shl");
  CHECK(shr<u32>(0x80000000, 31) == 1 && shr<u32>(0x80000000, 32) == 0, "shr of unsigned");
  CHECK(shr<s32>(-8, 1) == -4 && shr<s32>(-8, 99) == -1 && shr<s32>(8, 99) == 0, "shr of signed");
  CHECK(bfi<u32>(0xab, 0x11111111, 8, 8) == 0x1111ab11, "bfi");
  CHECK(bfi<u32>(0xfff, 0, 24, 8) == 0xff000000 && bfi<u32>(7, 9, 0, 32) == 7, "bfi at the ends");
  CHECK(bfi<u64>(5, 1, 32, 32) == (u64{5} << 32 | 1), "bfi of 64 bits");
  check_fails([] { bfi<u32>(0, 0, 30, 3); }, "bfi beyond the register");
  CHECK(prmt(0x33221100, 0x77665544, 0x7520) == 0x77552200, "prmt");
  CHECK(prmt(0x00008000, 0, 0x98) == 0x0000ff00, "prmt of signs");
  CHECK(mul_hi(-3, 5) == -1 && mul_hi(1 << 30, 8) == 2, "mul.hi");
  CHECK(div(-7, 2) == -3 && rem(-7, 2) == -1 && div<u32>(~0u, 2) == 0x7fffffff, "div, rem");
  CHECK(div(INT_MIN, -1) == INT_MIN && rem(INT_MIN, -1) == 0, "div, rem by -1");
  check_fails([] { div<s64>(1, 0); }, "division by zero");
}

void test_floats() {
  const float next = std::nextafter(1.0f, 2.0f), tiny = 0x1p-60f;
  CHECK(fma_rounded(1, 1, -tiny, FE_DOWNWARD) == std::nextafter(1.0f, 0.0f), "fma.rm");
  CHECK(fma_rounded(-1, 1, -tiny, FE_DOWNWARD) == -next && -1 - tiny == -1, "fma.rm below zero");
  CHECK(add_rounded(-1, -0x1.8p-24f, FE_TOWARDZERO) == -1 && -1 - 0x1.8p-24f == -next, "add.rz");
  CHECK(min_f32(NAN, 1) == 1 && max_f32(1, NAN) == 1 && max_f32(-2, 1) == 1, "min, max");
  CHECK(fma_sat(1, 0.5f, 0.25f) == 0.75f && fma_sat(3, 1, 1) == 1 && fma_sat(1, -1, 0) == 0 &&
            fma_sat(NAN, 1, 1) == 0,
        "fma.sat");
  CHECK(rcp_ftz(4) == 0.25f && rcp_ftz(0x1p-130f) == INFINITY && rcp_ftz(0x1p127f) == 0, "rcp");
  CHECK(cvt_rzi<s32>(-1.9f) == -1 && cvt_rzi<s32>(3e9f) == INT_MAX && cvt_rzi<s32>(NAN) == 0,
        "cvt.rzi.s32");
  CHECK(cvt_rzi<s64>(3e9f) == 3'000'000'000 && cvt_rzi<s64>(-INFINITY) == INT64_MIN, "cvt.rzi.s64");
  CHECK(cvt_sat(-1) == 0 && cvt_sat(0.5f) == 0.5f && cvt_sat(2) == 1 && cvt_sat(NAN) == 0,
        "cvt.sat");
}

void test_memory() {
  alignas(16) char bytes[32] = {};
  const u64 address = address_of(bytes);
  store<u16, 2>(bytes_at(address + 4, 4), {0x1122, 0x3344});
  const auto words = load<u32, 2>(bytes_at(address, 8));
  CHECK(words[0] == 0 && words[1] == 0x33441122, words[1]);
  check_fails([=] { bytes_at(address + 4, 8); }, "the address of 8 bytes is no multiple of them");
}

// A segment of eight lanes has 7 as its last and 0x18 as its mask.
void test_shuffles() {
  const auto source = [](const Source& s) { return s.inside ? s.lane : -s.lane; };
  CHECK(source(shuffle_source<Shuffle::kUp>(9, 1, 0x1800)) == 8, "up");
  CHECK(source(shuffle_source<Shuffle::kUp>(9, 2, 0x1800)) == -9, "up, outside");
  CHECK(source(shuffle_source<Shuffle::kXor>(9, 4, 0x1807 | 31)) == 13, "bfly");
  CHECK(source(shuffle_source<Shuffle::kXor>(1, 8, 0x1800 | 7)) == -1, "bfly, outside");
  CHECK(source(shuffle_source<Shuffle::kIndex>(9, 30, 0x181f)) == 14, "idx");
  CHECK(source(shuffle_source<Shuffle::kIndex>(9, 6, 0x1803)) == -9, "idx, outside");
}

}  // namespace
}  // namespace tree_attention::emulator::ptx

void test_ptx_instructions() {
  using namespace tree_attention::emulator::ptx;
  test_integers();
  test_floats();
  test_memory();
  test_shuffles();
}
