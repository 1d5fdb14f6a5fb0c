// SPDX-License-Identifier: BSD-3-Clause
//
// What the C++ that tests/cuda/ptx_translator.py makes of nvcc's PTX consists of, beside operators:
// instructions that C++ has no operator for. Instructions of whole warps, atomics and copies are
// the emulator's. Sections are those of the PTX ISA, version 9.0.
#pragma once

#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <source_location>
#include <type_traits>

#include "emulator.h"

namespace tree_attention::emulator::ptx {

using namespace tree_attention::cuda;
using std::bit_cast;
using std::source_location;

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

// A kernel's only parameter. The host passes one of up to 16 bytes as it passes pointers: such a
// parameter must not have floats alone.
template <size_t kAlign, size_t kSize>
struct Parameter {
  alignas(kAlign) char bytes[kSize];
};

inline uint64_t address_of(const char* bytes) { return reinterpret_cast<uintptr_t>(bytes); }
inline uint32_t shared_base(source_location where = source_location::current()) {
  return shared_address(dynamic_shared_memory(), where);
}

// Memory. Every state space but the shared one is the host's memory; an address is a multiple of
// the size of the access (6.4.1), which one of a vector is, too.
inline char* bytes_at(uint64_t address, int num_bytes,
                      source_location where = source_location::current()) {
  if (address % num_bytes != 0) {
    fail("the address of " + std::to_string(num_bytes) + " bytes is no multiple of them", where);
  }
  return reinterpret_cast<char*>(address);
}
inline char* shared_bytes_at(uint32_t address, int num_bytes,
                             source_location where = source_location::current()) {
  return shared_bytes(address, num_bytes, where);
}

template <typename T, size_t kCount>
std::array<T, kCount> load(const char* bytes) {
  std::array<T, kCount> values;
  std::memcpy(&values, bytes, sizeof(values));
  return values;
}
template <typename T, size_t kCount>
void store(char* bytes, const T (&values)[kCount]) {
  std::memcpy(bytes, values, sizeof(values));
}

// 9.7.8.8, 9.7.8.9 (shl, shr): a shift by the width or more leaves nothing but copies of the sign.
template <typename T>
T shl(T a, uint32_t b) {
  return b < 8 * sizeof(T) ? static_cast<T>(a << b) : T{0};
}
template <typename T>
T shr(T a, uint32_t b) {
  return b < 8 * sizeof(T) ? static_cast<T>(a >> b) : static_cast<T>(a < 0 ? -1 : 0);
}

// 9.7.8.6 (bfi), of fields that lie inside.
template <typename T>
T bfi(T field, T into, uint32_t position, uint32_t length,
      source_location where = source_location::current()) {
  if (length == 0 || position + length > 8 * sizeof(T)) fail("bfi beyond the register", where);
  const T mask = static_cast<T>(~T{0} >> (8 * sizeof(T) - length) << position);
  return static_cast<T>((field << position & mask) | (into & ~mask));
}

// 9.7.1.5 (mul.hi).
inline int32_t mul_hi(int32_t a, int32_t b) {
  return static_cast<int32_t>(int64_t{a} * int64_t{b} >> 32);
}

// 9.7.1.9, 9.7.1.10 (div, rem): what they give for a divisor of zero is not specified. The least
// number by -1 is itself, which the host cannot divide.
template <typename T>
bool is_minus_one(T b, source_location where) {
  if (b == 0) fail("division by zero", where);
  return std::is_signed_v<T> && b == static_cast<T>(-1);
}
template <typename T>
T div(T a, T b, source_location where = source_location::current()) {
  return is_minus_one(b, where) ? static_cast<T>(-static_cast<u64>(a)) : a / b;
}
template <typename T>
T rem(T a, T b, source_location where = source_location::current()) {
  return is_minus_one(b, where) ? 0 : a % b;
}

// 9.7.3 (floating point). `towards` is a rounding mode of <cfenv>; the volatile variables keep the
// operation between its two settings.
inline float fma_rounded(float a, float b, float c, int towards) {
  std::fesetround(towards);
  volatile float x = a, y = b, z = c;
  volatile float result = std::fma(x, y, z);
  std::fesetround(FE_TONEAREST);
  return result;
}
inline float add_rounded(float a, float b, int towards) {
  std::fesetround(towards);
  volatile float x = a, y = b;
  volatile float result = x + y;
  std::fesetround(FE_TONEAREST);
  return result;
}
// No less than 0, which NaN becomes, and no more than 1.
inline float fma_sat(float a, float b, float c) {
  const float d = std::fma(a, b, c);
  return d > 0 ? std::fmin(d, 1.0f) : 0.0f;
}

// Of one NaN and a number the number.
inline float min_f32(float a, float b) { return std::fmin(a, b); }
inline float max_f32(float a, float b) { return std::fmax(a, b); }
inline float rcp_ftz(float a) { return flush_to_zero(1.0f / flush_to_zero(a)); }

// 9.7.9.22 (cvt) towards zero: what is too large becomes the nearest number.
template <typename T>
T cvt_rzi(float a) {
  constexpr T kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
  if (std::isnan(a)) return sizeof(T) == 8 ? kLeast : T{0};
  if (a <= static_cast<float>(kLeast)) return kLeast;
  return a >= static_cast<float>(kMost) ? kMost : static_cast<T>(a);
}
inline float cvt_sat(float a) { return a > 0 ? std::fmin(a, 1.0f) : 0.0f; }

// 9.7.9.6 (shfl.sync): `clamp` has the last lane of a segment in bits 0 to 4 and which bits of a
// lane number the segment in bits 8 to 12. A lane whose source is outside of its segment keeps its
// value.
enum class Shuffle { kUp, kXor, kIndex };
struct Source {
  int lane;
  bool inside;
};
template <Shuffle kind>
Source shuffle_source(int lane, int argument, int clamp) {
  const int b = argument & 31, segment = clamp >> 8 & 31;
  const int most = (lane & segment) | (clamp & 31 & ~segment), least = lane & segment;
  const int source = kind == Shuffle::kUp    ? lane - b
                     : kind == Shuffle::kXor ? lane ^ b
                                             : least | (b & ~segment);
  const bool inside = kind == Shuffle::kUp ? source >= most : source <= most;
  return {inside ? source : lane, inside};
}
template <Shuffle kind>
uint32_t shfl(const char* name, uint32_t a, uint32_t b, uint32_t clamp, uint32_t mask, bool& inside,
              source_location where = source_location::current()) {
  const int argument = static_cast<int>(b), limits = static_cast<int>(clamp);
  inside = shuffle_source<kind>(static_cast<int>(threadIdx.x % kWarpSize), argument, limits).inside;
  return shuffle(name, mask, a, argument, limits, where, [](int lane, int argument, int limits) {
    return shuffle_source<kind>(lane, argument, limits).lane;
  });
}

}  // namespace tree_attention::emulator::ptx
