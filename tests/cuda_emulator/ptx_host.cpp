// SPDX-License-Identifier: BSD-3-Clause
//
// The functions of matrices, with the fragment layouts of the PTX ISA.
#include "ptx_host.h"

#include <algorithm>
#include <cstring>

#include "sanitizers.h"
#include "tensor_core.h"

namespace tree_attention::emulator {

TensorCore& tensor_core() {
  static TensorCore core = kRounding;
  return core;
}

}  // namespace tree_attention::emulator

namespace tree_attention::cuda {
namespace {

using emulator::kWarpSize;

constexpr int kMatrices = 4, kRows = 8, kRowBytes = 16;

struct LoadOperands {
  const char* row;
  uint32_t address;
  uint32_t (&matrices)[kMatrices];
};

// The eight rows of a matrix are read in one access to shared memory if they lie in different
// groups of four banks; every further row in the same group costs one more.
void count_bank_conflicts(void* const (&lanes)[kWarpSize], int matrix) {
  uint32_t addresses[kRows];
  for (int r = 0; r < kRows; ++r) {
    addresses[r] = static_cast<LoadOperands*>(lanes[matrix * kRows + r])->address;
  }
  std::sort(addresses, addresses + kRows);
  uint32_t* const end = std::unique(addresses, addresses + kRows);
  int rows_in_group[8] = {};
  for (uint32_t* a = addresses; a != end; ++a) ++rows_in_group[*a / kRowBytes % 8];
  emulator::counters().bank_conflicts += *std::max_element(rows_in_group, rows_in_group + 8) - 1;
}

template <bool kTransposed>
void load_matrices(void* const (&lanes)[kWarpSize]) {
  ++emulator::counters().matrix_loads;
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    uint16_t elements[kRows][kRows];
    for (int r = 0; r < kRows; ++r) {
      const auto& provider = *static_cast<LoadOperands*>(lanes[matrix * kRows + r]);
      std::memcpy(elements[r], provider.row, kRowBytes);
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int i = lane / 4, j = 2 * (lane % 4);
      const uint16_t low = kTransposed ? elements[j][i] : elements[i][j];
      const uint16_t high = kTransposed ? elements[j + 1][i] : elements[i][j + 1];
      static_cast<LoadOperands*>(lanes[lane])->matrices[matrix] = uint32_t{high} << 16 | low;
    }
    count_bank_conflicts(lanes, matrix);
  }
}

template <bool kTransposed>
void ldmatrix(const char* name, uint32_t (&matrices)[4], uint32_t row, source_location where) {
  LoadOperands operands{emulator::shared_bytes(row, kRowBytes, where), row, matrices};
  emulator::record_read(operands.row, kRowBytes);
  emulator::warp_function(name, &operands, load_matrices<kTransposed>, where);
}

struct MoveOperands {
  uint32_t matrix, transposed;
};

void transpose_matrix(void* const (&lanes)[kWarpSize]) {
  uint16_t elements[kRows][kRows];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    std::memcpy(&elements[lane / 4][2 * (lane % 4)],
                &static_cast<MoveOperands*>(lanes[lane])->matrix, sizeof(uint32_t));
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int i = lane / 4, j = 2 * (lane % 4);
    static_cast<MoveOperands*>(lanes[lane])->transposed =
        uint32_t{elements[j + 1][i]} << 16 | elements[j][i];
  }
}

struct MmaOperands {
  float (&d)[4];
  const uint32_t (&a)[4];
  uint32_t b[2];
};

struct FromBFloat16 {
  static float convert(uint16_t bits) { return cvt_f32_bf16(bits); }
};
struct FromFloat16 {
  static float convert(uint16_t bits) { return cvt_f32_f16(bits); }
};

template <typename From>
void multiply_matrices(void* const (&lanes)[kWarpSize]) {
  float a[16][16], b[8][16], d[16][8];  // b[n][k]
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& operands = *static_cast<MmaOperands*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      const auto element = [half](uint32_t pair) {
        return From::convert(static_cast<uint16_t>(pair >> (16 * half)));
      };
      const int k = 2 * t + half;
      a[g][k] = element(operands.a[0]);
      a[g + 8][k] = element(operands.a[1]);
      a[g][k + 8] = element(operands.a[2]);
      a[g + 8][k + 8] = element(operands.a[3]);
      b[g][k] = element(operands.b[0]);
      b[g][k + 8] = element(operands.b[1]);
      d[g][k] = operands.d[half];
      d[g + 8][k] = operands.d[2 + half];
    }
  }
  emulator::add_products(a, b, d);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    auto& operands = *static_cast<MmaOperands*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      operands.d[half] = d[g][2 * t + half];
      operands.d[2 + half] = d[g + 8][2 * t + half];
    }
  }
}

}  // namespace

void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t row, source_location where) {
  ldmatrix<false>("ldmatrix", matrices, row, where);
}

void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t row, source_location where) {
  ldmatrix<true>("ldmatrix.trans", matrices, row, where);
}

uint32_t movmatrix_trans(uint32_t matrix, source_location where) {
  MoveOperands operands{matrix, 0};
  emulator::warp_function("movmatrix", &operands, transpose_matrix, where);
  return operands.transposed;
}

void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                       source_location where) {
  MmaOperands operands{d, a, {b0, b1}};
  emulator::warp_function("mma.bf16", &operands, multiply_matrices<FromBFloat16>, where);
}

void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                      source_location where) {
  MmaOperands operands{d, a, {b0, b1}};
  emulator::warp_function("mma.f16", &operands, multiply_matrices<FromFloat16>, where);
}

}  // namespace tree_attention::cuda
