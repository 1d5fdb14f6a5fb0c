// SPDX-License-Identifier: BSD-3-Clause
//
// Known answers of the functions of csrc/cuda/ptx_hopper.h, of matrix_descriptor.cuh, and of the
// barriers of some threads of a block. See ptx_known_answers.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "cuda/matrix_descriptor.cuh"
#include "known_answers_device.h"

namespace tree_attention::testing {

// Products of four warps are for compute capability 9.0 alone, and not in PTX for later devices.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWgmma = false;
#else
constexpr bool kHasWgmma = true;
#endif

// Pairs of warps meet at a barrier of their own, twice, and vote.
struct NamedBarrierParams {
  uint32_t* out;  // [128, 3]: of the other warp of the pair, then votes
};
template <typename Params>
__global__ void named_barrier_kernel(const Params p) {
  const uint32_t i = threadIdx.x, pair = 1 + i / 64, other = i ^ 32;
  uint32_t* const words = reinterpret_cast<uint32_t*>(cuda::dynamic_shared_memory());
  words[i] = 7 * i;
  cuda::bar_sync(pair, 64);
  p.out[3 * i] = words[other];
  p.out[3 * i + 1] = cuda::bar_red_or(pair, 64, i == 70);
  p.out[3 * i + 2] = cuda::bar_red_or(5, 128, i == 70);
}

inline void test_named_barriers(const Device& device) {
  uint32_t* out = device.array(std::vector<uint32_t>(128 * 3));
  device.run(named_barrier_kernel<NamedBarrierParams>, 1, 128, 512, NamedBarrierParams{out});
  for (uint32_t i = 0; i < 128; ++i) {
    CHECK(out[3 * i] == 7 * (i ^ 32), "thread ", i, " read ", out[3 * i]);
    CHECK(out[3 * i + 1] == i / 64 && out[3 * i + 2] == 1, "the votes of thread ", i);
  }
}

struct HasWgmmaParams {
  uint32_t* out;
};
template <typename Params>
__global__ void has_wgmma_kernel(const Params p) {
  if (threadIdx.x == 0) *p.out = kHasWgmma;
}

// The driver's function by its name: the library of the driver is not linked.
inline CUtensorMap encode(const uint16_t* address, int rank, const cuuint64_t* sizes,
                          const cuuint64_t* strides, const cuuint32_t* box) {
  void* function = nullptr;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, nullptr) == cudaSuccess &&
            function != nullptr,
        "cuTensorMapEncodeTiled");
  const cuuint32_t ones[] = {1, 1, 1, 1};
  CUtensorMap map;
  CHECK(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
            &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(rank),
            const_cast<uint16_t*>(address), sizes, strides, box, ones,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
        "the tensor map");
  return map;
}

// Threads 32 to 63 read what threads 0 to 31 write and what a copy brings, in four rounds through
// one buffer, with a barrier for "full" and one for "empty".
struct MemoryBarrierParams {
  CUtensorMap in;  // [4, 64], in boxes of a row
  uint32_t* out;   // [4, 2, 32]: written, copied
};
template <typename Params>
__global__ void memory_barrier_kernel(const __grid_constant__ Params p) {
  if constexpr (kHasWgmma) {
    char* const memory = cuda::dynamic_shared_memory();
    uint32_t* const copied = reinterpret_cast<uint32_t*>(memory);
    uint32_t* const written = copied + 32;
    const uint32_t full = cuda::shared_address(memory + 256), empty = full + 8;
    const uint32_t lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      cuda::mbarrier_init(full, 32);
      cuda::mbarrier_init(empty, 32);
      cuda::fence_mbarrier_init();
    }
    __syncthreads();
    for (uint32_t round = 0; round < 4; ++round) {
      const uint32_t parity = round % 2;
      if (threadIdx.x < 32) {
        while (!cuda::mbarrier_try_wait_parity(empty, parity ^ 1)) {
        }
        written[lane] = 1000 * round + lane;
        if (lane == 0) {
          cuda::mbarrier_arrive_expect_tx(full, 128);
          cuda::cp_async_bulk_tensor_4d(cuda::shared_address(copied), &p.in, 0, round, 0, 0, full);
        } else {
          cuda::mbarrier_arrive(full);
        }
      } else {
        while (!cuda::mbarrier_try_wait_parity(full, parity)) {
        }
        p.out[64 * round + lane] = written[31 - lane];
        p.out[64 * round + 32 + lane] = copied[31 - lane];
        cuda::mbarrier_arrive(empty);
      }
    }
  }
}

inline void test_memory_barriers(const Device& device) {
  std::vector<uint16_t> in(4 * 64);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i + 1);
  const cuuint64_t sizes[] = {64, 4, 1, 1}, strides[] = {128, 512, 512};
  const cuuint32_t box[] = {64, 1, 1, 1};
  uint32_t* out = device.array(std::vector<uint32_t>(in.size()));
  device.run(memory_barrier_kernel<MemoryBarrierParams>, 1, 64, 1024,
             MemoryBarrierParams{encode(device.array(in), 4, sizes, strides, box), out});
  for (uint32_t i = 0; i < in.size() / 2; ++i) {
    const uint32_t round = i / 32, lane = i % 32, other = 32 * round + 31 - lane;
    const uint32_t expected = uint32_t{in[2 * other + 1]} << 16 | in[2 * other];
    CHECK(out[64 * round + lane] == 1000 * round + 31 - lane, "written, ", i);
    CHECK(out[64 * round + 32 + lane] == expected, "copied, ", i);
  }
}

// A box of 64 columns and 16 rows from the middle of a tensor, and one that is partly outside.
constexpr int kBoxRows = 16, kBoxBytes = kBoxRows * cuda::kBoxRowBytes;
struct BoxParams {
  CUtensorMap rows_first, rows_second;  // whether a box's rows are dimension 1 or 2
  int32_t x, y, z, w;
  uint16_t* out;  // [2, kBoxRows, 64]: shared memory as it is
};
template <typename Params>
__global__ void box_kernel(const __grid_constant__ Params p) {
  if constexpr (kHasWgmma) {
    char* const memory = cuda::dynamic_shared_memory();
    const uint32_t boxes = cuda::shared_address(memory), barrier = boxes + 2 * kBoxBytes;
    if (threadIdx.x == 0) {
      cuda::mbarrier_init(barrier, 1);
      cuda::fence_mbarrier_init();
      cuda::mbarrier_arrive_expect_tx(barrier, 2 * kBoxBytes);
      cuda::cp_async_bulk_tensor_4d(boxes, &p.rows_first, p.x, p.y, p.z, p.w, barrier);
      cuda::cp_async_bulk_tensor_4d(boxes + kBoxBytes, &p.rows_second, p.x, p.z, p.y, p.w, barrier);
    }
    __syncthreads();
    while (!cuda::mbarrier_try_wait_parity(barrier, 0)) {
    }
    const uint16_t* const elements = reinterpret_cast<const uint16_t*>(memory);
    for (int i = static_cast<int>(threadIdx.x); i < kBoxBytes; i += 32) p.out[i] = elements[i];
  }
}

inline void test_boxes(const Device& device) {
  // [w, z, y, x] with padding after y.
  constexpr int kX = 128, kY = 40, kZ = 3, kW = 2, kRow = kX + 8;
  std::vector<uint16_t> in(kW * kZ * (kY + 1) * kRow);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i + 1);
  const uint16_t* const tensor = device.array(in);
  const auto place = [&](int x, int y, int z, int w) {
    return ((w * kZ + z) * (kY + 1) + y) * kRow + x;
  };
  const cuuint64_t row = 2 * kRow, matrix = row * (kY + 1), all = matrix * kZ;
  const cuuint64_t sizes_1[] = {kX, kY, kZ, kW}, strides_1[] = {row, matrix, all};
  const cuuint64_t sizes_2[] = {kX, kZ, kY, kW}, strides_2[] = {matrix, row, all};
  const cuuint32_t box_1[] = {64, kBoxRows, 1, 1}, box_2[] = {64, 1, kBoxRows, 1};
  const CUtensorMap rows_first = encode(tensor, 4, sizes_1, strides_1, box_1);
  const CUtensorMap rows_second = encode(tensor, 4, sizes_2, strides_2, box_2);
  const int32_t begins[][2] = {{64, 8}, {0, 32}, {96, -4}, {-32, 30}, {64, 100}};
  for (const auto& [x, y] : begins) {
    uint16_t* out = device.array(std::vector<uint16_t>(kBoxBytes, 0xffff));
    device.run(box_kernel<BoxParams>, 1, 32, 2 * kBoxBytes + 8,
               BoxParams{rows_first, rows_second, x, y, 1, 1, out});
    for (int i = 0; i < kBoxBytes; ++i) {
      const int box = i / (kBoxBytes / 2), r = i / 64 % kBoxRows, c = i % 64;
      const bool inside = x + c >= 0 && x + c < kX && y + r >= 0 && y + r < kY;
      const uint16_t expected = inside ? in[place(x + c, y + r, 1, 1)] : uint16_t{0};
      const uint16_t found = out[(box * kBoxBytes + cuda::swizzled(r, 2 * c)) / 2];
      CHECK(found == expected, "box ", box, " at ", x, ", ", y, ": row ", r, ", column ", c, " is ",
            found, ", not ", expected);
    }
  }
}

// d += a b^T of two sixteens of k, of whole matrices that threads write to shared memory; a has a
// row for each m or, where kTransposedA, for each k.
struct WgmmaParams {
  const float* a;  // [64, 32]
  const float* b;  // [n, 32]
  float* d;        // [64, n]
  bool bf16;
};
template <typename Params, int kN, bool kTransposedA>
__global__ void wgmma_kernel(const Params p) {
  if constexpr (kHasWgmma) {
    constexpr int kK = 32, kFirst = 16;  // a box's column of the first k
    char* const memory = cuda::dynamic_shared_memory();
    char* const of_b = memory + 64 * cuda::kBoxRowBytes;
    const auto put = [&](char* box, int row, int column, float x) {
      *reinterpret_cast<uint16_t*>(box + cuda::swizzled(row, 2 * column)) =
          static_cast<uint16_t>(p.bf16 ? cuda::cvt_bf16x2(x, 0.0f) : cuda::cvt_f16x2(x, 0.0f));
    };
    const int i = static_cast<int>(threadIdx.x);
    for (int j = i; j < 64 * kK; j += 128) {
      const int m = j / kK, k = j % kK;
      if (kTransposedA) {
        put(memory, k, m, p.a[j]);
      } else {
        put(memory, m, kFirst + k, p.a[j]);
      }
    }
    for (int j = i; j < kN * kK; j += 128) put(of_b, j / kK, kFirst + j % kK, p.b[j]);
    cuda::fence_proxy_async();
    __syncthreads();
    const int warp = i / 32, g = i % 32 / 4, t = i % 4 * 2;
    const auto place = [&](int j) {  // in d
      return (16 * warp + g + j / 2 % 2 * 8) * kN + j / 4 * 8 + t + j % 2;
    };
    float d[kN / 2];
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) d[j] = p.d[place(j)];
    const uint32_t address_a = cuda::shared_address(memory), address_b = cuda::shared_address(of_b);
    cuda::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint64_t b = cuda::matrix_descriptor(address_b + 2 * (kFirst + 16 * step));
      const uint64_t a = cuda::matrix_descriptor(
          address_a + (kTransposedA ? 16 * step * cuda::kBoxRowBytes : 2 * (kFirst + 16 * step)));
      if (p.bf16) {
        cuda::wgmma_m64k16_bf16<kTransposedA>(d, a, b);
      } else {
        cuda::wgmma_m64k16_f16<kTransposedA>(d, a, b);
      }
      cuda::wgmma_commit_group();
    }
    cuda::wgmma_wait_group<1>();
    cuda::wgmma_wait_group<0>();
    cuda::wgmma_pin(d);
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) p.d[place(j)] = d[j];
  }
}

// Small whole numbers: every order of addition is exact.
template <int kN, bool kTransposedA>
void test_wgmma_of(const Device& device) {
  constexpr int kK = 32;
  std::vector<float> a(64 * kK), b(kN * kK), d(64 * kN);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i * i % 23) - 11.0f;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i * i * i % 19) - 9.0f;
  for (size_t i = 0; i < d.size(); ++i) d[i] = static_cast<float>(i);
  a[kK * 37 + 3] = -INFINITY;
  b[kK * 5 + 20] = NAN;
  for (const bool bf16 : {false, true}) {
    float* out = device.array(d);
    device.run(wgmma_kernel<WgmmaParams, kN, kTransposedA>, 1, 128, (64 + kN) * cuda::kBoxRowBytes,
               WgmmaParams{device.array(a), device.array(b), out, bf16});
    for (int m = 0; m < 64; ++m) {
      for (int n = 0; n < kN; ++n) {
        float expected = d[kN * m + n];
        for (int k = 0; k < kK; ++k) expected += a[kK * m + k] * b[kK * n + k];
        const float found = out[kN * m + n];
        CHECK(std::isnan(expected) ? std::isnan(found) : found == expected, "n ", kN,
              kTransposedA ? ", a transposed" : "", ", row ", m, ", column ", n, ": ", found,
              ", not ", expected);
      }
    }
    CHECK(std::isnan(out[5]) && std::isinf(out[kN * 37]), "NaN and infinity");
  }
}

template <bool kTransposedA>
void test_wgmma(const Device& device) {
  test_wgmma_of<16, kTransposedA>(device);
  test_wgmma_of<32, kTransposedA>(device);
  test_wgmma_of<64, kTransposedA>(device);
}

// Where the kernels were compiled for a device that has the instructions.
inline void test_hopper(const Device& device) {
  uint32_t* has_wgmma = device.array(std::vector<uint32_t>(1));
  device.run(has_wgmma_kernel<HasWgmmaParams>, 1, 32, 0, HasWgmmaParams{has_wgmma});
  if (*has_wgmma == 0) return;
  test_memory_barriers(device);
  test_boxes(device);
  test_wgmma<false>(device);
  test_wgmma<true>(device);
}

}  // namespace tree_attention::testing
