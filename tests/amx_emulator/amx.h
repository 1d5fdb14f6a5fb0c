// SPDX-License-Identifier: BSD-3-Clause
//
// AMX for processors without it. Included before a source of csrc/cpu (g++ -include), it puts
// functions in the place of the tile intrinsics that the kernels use, whose text stays as it is.
// They do what the "Operation" and "Exceptions" of each instruction say in Intel's manual
// (Architectures Software Developer's Manual, volume 2): where the processor would raise an
// exception, they throw. Products need AVX-512. Loads and stores of tiles are accesses that
// AddressSanitizer sees, which it does not of the instructions. Not emulated is that the compiler
// does not know that the instructions read memory (finish_stores of csrc/cpu/amx).
#pragma once

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>

namespace amx_emulator {

constexpr int kNumTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
  int num_rows = 0, row_bytes = 0;  // 0: not configured
  alignas(64) unsigned char rows[kRows][kRowBytes] = {};

  uint32_t word(int row, int i) const {
    uint32_t word;
    std::memcpy(&word, rows[row] + 4 * i, sizeof(word));
    return word;
  }
};

// The registers of a thread.
inline constinit thread_local Tile tiles[kNumTiles];

inline void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(std::string("emulated AMX: ") + what);
}

inline Tile& tile(int i) {
  require(tiles[i].num_rows != 0, "a tile is used that is not configured");
  return tiles[i];
}

inline void release() {
  for (Tile& tile : tiles) tile = {};
}

inline void load_config(const void* memory) {
  unsigned char bytes[64];
  std::memcpy(bytes, memory, sizeof(bytes));
  const auto all_zero = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      if (bytes[i] != 0) return false;
    }
    return true;
  };
  require(bytes[0] == 1, "the palette must be 1");
  // Byte 1 is the row at which an interrupted instruction goes on; no program sets it.
  require(all_zero(1, 16) && all_zero(32, 48) && all_zero(56, 64), "reserved bytes must be 0");
  release();
  for (int i = 0; i < kNumTiles; ++i) {
    const int row_bytes = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i], num_rows = bytes[48 + i];
    require(row_bytes <= kRowBytes && num_rows <= kRows, "a tile has 16 rows of 64 bytes at most");
    require((row_bytes == 0) == (num_rows == 0),
            "a tile has rows without bytes or bytes without rows");
    tiles[i].num_rows = num_rows;
    tiles[i].row_bytes = row_bytes;
  }
}

inline void zero(int i) { std::memset(tile(i).rows, 0, sizeof(Tile::rows)); }

// `stride` in bytes.
inline void load(int i, const void* memory, int64_t stride) {
  zero(i);
  for (int row = 0; row < tile(i).num_rows; ++row) {
    std::memcpy(tile(i).rows[row], static_cast<const char*>(memory) + row * stride,
                tile(i).row_bytes);
  }
}

inline void store(int i, void* memory, int64_t stride) {
  for (int row = 0; row < tile(i).num_rows; ++row) {
    std::memcpy(static_cast<char*>(memory) + row * stride, tile(i).rows[row], tile(i).row_bytes);
  }
}

inline void check_product(int sum, int a, int b) {
  require(sum != a && sum != b && a != b, "the tiles of a product must differ");
  require(tile(sum).row_bytes % 4 == 0 && tile(a).row_bytes % 4 == 0 && tile(b).row_bytes % 4 == 0,
          "rows of a product must have whole words");
  require(tile(sum).num_rows == tile(a).num_rows && tile(sum).row_bytes == tile(b).row_bytes &&
              tile(a).row_bytes / 4 == tile(b).num_rows,
          "the shapes of a product do not match");
}

// Subnormal numbers are zeros, and sums are rounded to nearest, whatever the thread has set.
class ProductRounding {
 public:
  ProductRounding() {
    asm volatile("stmxcsr %0" : "=m"(before_)::"memory");
    constexpr uint32_t kMasked = 0x1f80, kFlushToZero = 0x8000, kDenormalsAreZeros = 0x40;
    set(kMasked | kFlushToZero | kDenormalsAreZeros);
  }
  ~ProductRounding() { set(before_); }

 private:
  static void set(uint32_t control) { asm volatile("ldmxcsr %0" ::"m"(control) : "memory"); }
  uint32_t before_;
};

// Pairs of bfloat16. The first elements of pairs are summed on their own, as are the second ones.
// Not inlined, so that no product leaves the scope of the rounding.
[[gnu::noinline, gnu::target("avx512f")]] inline void add_products(Tile& sum, const Tile& a,
                                                                   const Tile& b) {
  constexpr uint32_t kSecond = 0xffff0000;
  using Words = uint32_t __attribute__((vector_size(kRowBytes)));
  const auto columns = static_cast<__mmask16>((1u << sum.row_bytes / 4) - 1);
  for (int row = 0; row < sum.num_rows; ++row) {
    __m512 sums[2] = {};
    for (int k = 0; k < b.num_rows; ++k) {
      const Words of_a = Words{} + a.word(row, k), of_b = reinterpret_cast<const Words&>(b.rows[k]);
      sums[0] = _mm512_fmadd_ps(reinterpret_cast<__m512>(of_a << 16),
                                reinterpret_cast<__m512>(of_b << 16), sums[0]);
      sums[1] = _mm512_fmadd_ps(reinterpret_cast<__m512>(of_a & kSecond),
                                reinterpret_cast<__m512>(of_b & kSecond), sums[1]);
    }
    _mm512_store_ps(sum.rows[row], _mm512_maskz_add_ps(columns, _mm512_load_ps(sum.rows[row]),
                                                       _mm512_add_ps(sums[0], sums[1])));
  }
}

inline void multiply_bfloat16(int sum, int a, int b) {
  check_product(sum, a, b);
  const ProductRounding rounding;
  add_products(tile(sum), tile(a), tile(b));
}

// Signed bytes, four to a word; sums wrap.
inline void multiply_bytes(int sum, int a, int b) {
  check_product(sum, a, b);
  const auto byte = [](const Tile& tile, int row, int i) {
    return static_cast<signed char>(tile.rows[row][i]);
  };
  for (int row = 0; row < tile(sum).num_rows; ++row) {
    for (int column = 0; column < tile(sum).row_bytes / 4; ++column) {
      uint32_t word = tile(sum).word(row, column);
      for (int i = 0; i < tile(a).row_bytes; ++i) {
        word +=
            static_cast<uint32_t>(byte(tile(a), row, i) * byte(tile(b), i / 4, 4 * column + i % 4));
      }
      std::memcpy(tile(sum).rows[row] + 4 * column, &word, sizeof(word));
    }
  }
}

// Where a test says so, the lines that a thread has fetched ahead: addresses over 64.
inline constinit thread_local std::set<uintptr_t>* fetched_lines = nullptr;
template <typename... Hints>
void prefetch(const void* address, Hints...) {
  if (fetched_lines) fetched_lines->insert(reinterpret_cast<uintptr_t>(address) / 64);
}

// What csrc/cpu/instruction_set.cpp asks: the processor has tiles, and Linux lets them be used.
inline int cpuid(unsigned leaf, unsigned subleaf, unsigned* eax, unsigned* ebx, unsigned* ecx,
                 unsigned* edx) {
  if (__get_cpuid_count(leaf, subleaf, eax, ebx, ecx, edx) == 0) return 0;
  if (leaf == 7 && subleaf == 0) *edx |= 1u << 22 | 1u << 24 | 1u << 25;
  return 1;
}
template <typename... Arguments>
long system_call(long number, Arguments... arguments) {
  return number == SYS_arch_prctl ? 0 : ::syscall(number, arguments...);
}

}  // namespace amx_emulator

#define __get_cpuid_count ::amx_emulator::cpuid
#define __builtin_prefetch ::amx_emulator::prefetch
#define syscall ::amx_emulator::system_call

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig ::amx_emulator::load_config
#define _tile_release ::amx_emulator::release
#define _tile_loadd ::amx_emulator::load
#define _tile_stream_loadd ::amx_emulator::load
#define _tile_stored ::amx_emulator::store
#define _tile_zero ::amx_emulator::zero
#define _tile_dpbf16ps ::amx_emulator::multiply_bfloat16
#define _tile_dpbssd ::amx_emulator::multiply_bytes

#endif
