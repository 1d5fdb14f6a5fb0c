// SPDX-License-Identifier: BSD-3-Clause
//
// Known answers of the instructions on matrices that a warp holds together: ldmatrix, movmatrix and
// mma. See ptx_known_answers.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "known_answers_device.h"

namespace tree_attention::testing {

// Element (r, c) of matrix i is 64 i + 8 r + c, then 256 more; rows are 80 bytes apart.
struct LoadParams {
  uint32_t* out;  // [2, 2, 32, 4]: before and after; without and with transposition
};
template <typename Params>
__global__ void load_kernel(const Params p) {
  const int lane = threadIdx.x;
  char* row = cuda::dynamic_shared_memory() + 80 * lane;
  uint32_t* out = p.out + 4 * lane;
#pragma unroll 1
  for (int more = 0; more < 512; more += 256, out += 256) {
    for (int c = 0; c < 8; ++c) {
      reinterpret_cast<uint16_t*>(row)[c] = static_cast<uint16_t>(8 * lane + c + more);
    }
    __syncwarp();
    uint32_t matrices[4];
    cuda::ldmatrix_x4(matrices, cuda::shared_address(row));
    for (int i = 0; i < 4; ++i) out[i] = matrices[i];
    cuda::ldmatrix_x4_trans(matrices, cuda::shared_address(row));
    for (int i = 0; i < 4; ++i) out[128 + i] = matrices[i];
    __syncwarp();
  }
}

inline void test_matrix_loads(const Device& device) {
  uint32_t* out = device.array(std::vector<uint32_t>(2 * 2 * 32 * 4));
  device.run(load_kernel<LoadParams>, 1, 32, 80 * 32, LoadParams{out});
  for (uint32_t j = 0; j < 2 * 32 * 4; ++j) {
    const uint32_t i = j % 4, lane = j / 4 % 32, more = j / 128 * 256;
    const uint32_t r = lane / 4, c = 2 * (lane % 4), at = j + more / 2;
    const uint32_t low = 64 * i + 8 * r + c + more, across = 64 * i + 8 * c + r + more;
    CHECK(out[at] == ((low + 1) << 16 | low), "lane ", lane, ", matrix ", i);
    CHECK(out[128 + at] == ((across + 8) << 16 | across), "lane ", lane, ", transposed ", i);
  }
}

// Element (r, c) of the matrix is 8 r + c.
struct MoveParams {
  uint32_t* out;  // [32]
};
template <typename Params>
__global__ void move_kernel(const Params p) {
  const uint32_t low = 2 * threadIdx.x;
  p.out[threadIdx.x] = cuda::movmatrix_trans((low + 1) << 16 | low);
}

inline void test_matrix_moves(const Device& device) {
  uint32_t* out = device.array(std::vector<uint32_t>(32));
  device.run(move_kernel<MoveParams>, 1, 32, 0, MoveParams{out});
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t low = 16 * (lane % 4) + lane / 4;  // row 2 (lane % 4), column lane / 4
    CHECK(out[lane] == ((low + 8) << 16 | low), "lane ", lane, " has ", out[lane]);
  }
}

// One product of whole matrices, kept in rows.
struct MmaParams {
  const float* a;  // [16, 16]
  const float* b;  // [16, 8]
  float* d;        // [16, 8], added to
  bool bf16;
};
template <typename Params>
__global__ void mma_kernel(const Params p) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  const auto pair = [&](float low, float high) {
    return p.bf16 ? cuda::cvt_bf16x2(low, high) : cuda::cvt_f16x2(low, high);
  };
  const auto pair_of_a = [&](int row, int k) {
    return pair(p.a[16 * row + k], p.a[16 * row + k + 1]);
  };
  const auto pair_of_b = [&](int k) { return pair(p.b[8 * k + g], p.b[8 * (k + 1) + g]); };
  const uint32_t a[4] = {pair_of_a(g, t), pair_of_a(g + 8, t), pair_of_a(g, t + 8),
                         pair_of_a(g + 8, t + 8)};
  float d[4] = {p.d[8 * g + t], p.d[8 * g + t + 1], p.d[8 * (g + 8) + t], p.d[8 * (g + 8) + t + 1]};
  if (p.bf16) {
    cuda::mma_m16n8k16_bf16(d, a, pair_of_b(t), pair_of_b(t + 8));
  } else {
    cuda::mma_m16n8k16_f16(d, a, pair_of_b(t), pair_of_b(t + 8));
  }
  for (int i = 0; i < 4; ++i) p.d[8 * (g + i / 2 * 8) + t + i % 2] = d[i];
}

// Small whole numbers: every order of addition is exact.
inline void test_mma(const Device& device) {
  for (const bool bf16 : {false, true}) {
    std::vector<float> a(16 * 16), b(16 * 8), d(16 * 8), expected;
    for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i * i % 23) - 11.0f;
    for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i * i * i % 19) - 9.0f;
    for (size_t i = 0; i < d.size(); ++i) d[i] = static_cast<float>(i);
    a[16 * 5 + 3] = -INFINITY;
    b[8 * 9 + 6] = NAN;
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        float sum = d[8 * m + n];
        for (int k = 0; k < 16; ++k) sum += a[16 * m + k] * b[8 * k + n];
        expected.push_back(sum);
      }
    }
    float* out = device.array(d);
    device.run(mma_kernel<MmaParams>, 1, 32, 0,
               MmaParams{device.array(a), device.array(b), out, bf16});
    for (size_t i = 0; i < d.size(); ++i) {
      CHECK(std::isnan(expected[i]) ? std::isnan(out[i]) : out[i] == expected[i], "row ", i / 8,
            ", column ", i % 8, ": ", out[i], ", not ", expected[i]);
    }
    CHECK(std::isnan(out[6]) && std::isinf(out[8 * 5]), "NaN and infinity");
  }
}

}  // namespace tree_attention::testing
