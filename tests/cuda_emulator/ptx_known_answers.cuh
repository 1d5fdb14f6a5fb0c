// SPDX-License-Identifier: BSD-3-Clause
//
// Known answers of every function of csrc/cuda/ptx.h and of the built-ins that kernels use. The
// same kernels run under the emulator and, compiled by nvcc, on a GPU and as translated PTX: what
// shows that the strings of ptx.h and the emulator's host functions mean the same.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "known_answers_device.h"
#include "ptx_known_hopper.cuh"
#include "ptx_known_matrices.cuh"
#include "ptx_known_pairs.cuh"

namespace tree_attention::testing {

// Copies of 16 bytes in two groups; every fourth one is of no bytes, from nowhere.
struct CopyParams {
  const uint32_t* in;  // [2, 32, 4]: group, lane, word
  uint32_t* out;       // like in
};
template <typename Params>
__global__ void copy_kernel(const Params p) {
  const int lane = threadIdx.x;
  uint32_t* shared = reinterpret_cast<uint32_t*>(cuda::dynamic_shared_memory());
  const bool copy = lane % 4 != 3;
  for (int begin = 4 * lane; begin < 256; begin += 128) {
    cuda::cp_async_16(cuda::shared_address(shared + begin), copy ? p.in + begin : nullptr,
                      copy ? 16 : 0);
    cuda::cp_async_commit_group();
  }
  cuda::cp_async_wait_group<1>();
  for (int i = 4 * lane; i < 4 * lane + 4; ++i) p.out[i] = shared[i];
  cuda::cp_async_wait_group<0>();
  __syncthreads();
  const int neighbour = 128 + (4 * lane + 4) % 128;  // its thread has waited
  for (int i = neighbour; i < neighbour + 4; ++i) p.out[i] = shared[i];
}

inline void test_copies(const Device& device) {
  std::vector<uint32_t> in(256);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint32_t>(0x01010101 * (i + 1));
  uint32_t* out = device.array(std::vector<uint32_t>(in.size(), 7));
  device.run(copy_kernel<CopyParams>, 1, 32, in.size() * 4, CopyParams{device.array(in), out});
  for (size_t i = 0; i < in.size(); ++i) {
    CHECK(out[i] == (i / 4 % 4 == 3 ? 0 : in[i]), "word ", i, " is ", out[i]);
  }
}

// Copies of 4 bytes; every other one is of no bytes, from nowhere.
struct WordParams {
  const uint32_t* in;  // [32]
  uint32_t* out;       // like in
};
template <typename Params>
__global__ void word_kernel(const Params p) {
  const int lane = threadIdx.x;
  uint32_t* shared = reinterpret_cast<uint32_t*>(cuda::dynamic_shared_memory());
  const bool copy = lane % 2 == 0;
  cuda::cp_async_4(cuda::shared_address(shared + lane), copy ? p.in + lane : nullptr, copy ? 4 : 0);
  cuda::cp_async_commit_group();
  cuda::cp_async_wait_group<0>();
  __syncthreads();
  p.out[lane] = shared[31 - lane];
}

inline void test_words(const Device& device) {
  std::vector<uint32_t> in(32);
  for (uint32_t i = 0; i < in.size(); ++i) in[i] = 0x01010101 * (i + 1);
  uint32_t* out = device.array(std::vector<uint32_t>(in.size(), 7));
  device.run(word_kernel<WordParams>, 1, 32, in.size() * 4, WordParams{device.array(in), out});
  for (size_t i = 0; i < in.size(); ++i) {
    CHECK(out[i] == (i % 2 == 0 ? 0 : in[31 - i]), "word ", i, " is ", out[i]);
  }
}

struct FloatParams {
  const float* in;
  float* ex2;
  float* lg2;
  uint32_t* bf16;  // cvt_bf16x2(1, x)
  uint32_t* f16;
};
template <typename Params>
__global__ void float_kernel(const Params p) {
  const float x = p.in[threadIdx.x];
  p.ex2[threadIdx.x] = cuda::ex2(x);
  p.lg2[threadIdx.x] = cuda::lg2(x);
  p.bf16[threadIdx.x] = cuda::cvt_bf16x2(1.0f, x);
  p.f16[threadIdx.x] = cuda::cvt_f16x2(1.0f, x);
}

inline void test_floats(const Device& device) {
  constexpr float kInf = INFINITY, kAny = 12345.0f;  // kAny: not compared
  const struct {
    float x, ex2;
    uint16_t bf16, f16;
    float lg2 = kAny;
  } answers[] = {
      {0.0f, 1.0f, 0x0000, 0x0000, -kInf},
      {-0.0f, 1.0f, 0x8000, 0x8000},
      {1.0f, 2.0f, 0x3f80, 0x3c00, 0.0f},
      {8.0f, 256.0f, 0x4100, 0x4800, 3.0f},
      {-3.0f, 0.125f, 0xc040, 0xc200, NAN},
      {kInf, kInf, 0x7f80, 0x7c00, kInf},
      {-kInf, 0.0f, 0xff80, 0xfc00},
      {NAN, NAN, 0x7fff, 0x7fff, NAN},
      {-127.0f, 0.0f, 0xc2fe, 0xd7f0},           // the result is not a normal number
      {0x1p-140f, 1.0f, 0x0000, 0x0000, -kInf},  // nor is the argument
      {128.0f, kInf, 0x4300, 0x5800},
      {0x1.01p0f, kAny, 0x3f80, 0x3c04},  // bf16: half way, to even
      {0x1.03p0f, kAny, 0x3f82, 0x3c0c},
      {0x1.010002p0f, kAny, 0x3f81, 0x3c04},
      {0x1.002p0f, kAny, 0x3f80, 0x3c00},  // f16: half way, to even
      {0x1.006p0f, kAny, 0x3f80, 0x3c02},
      {65504.0f, kInf, 0x4780, 0x7bff},
      {65520.0f, kInf, 0x4780, 0x7c00},          // the first that f16 rounds to infinity
      {0x1p-24f, 1.0f, 0x3380, 0x0001, -24.0f},  // the least of f16
      {0x1.fffffep127f, kInf, 0x7f80, 0x7c00, 128.0f},
      {0.3f, 1.2311444133f, 0x3e9a, 0x34cd, -1.7369656f},
      {-20.7f, 5.8706e-7f, 0xc1a6, 0xcd2d},
  };
  std::vector<float> in;
  for (const auto& answer : answers) in.push_back(answer.x);
  const size_t n = in.size();
  in.resize(32);
  float* ex2 = device.array(std::vector<float>(32));
  float* lg2 = device.array(std::vector<float>(32));
  uint32_t* bf16 = device.array(std::vector<uint32_t>(32));
  uint32_t* f16 = device.array(std::vector<uint32_t>(32));
  device.run(float_kernel<FloatParams>, 1, 32, 0,
             FloatParams{device.array(in), ex2, lg2, bf16, f16});
  const auto close = [](float a, float b) {
    return b == kAny || a == b || (std::isnan(a) && std::isnan(b)) ||
           std::abs(a - b) <= 2e-5f * std::abs(b);
  };
  for (size_t i = 0; i < n; ++i) {
    const auto& answer = answers[i];
    CHECK(close(ex2[i], answer.ex2), "ex2(", answer.x, ") is ", ex2[i]);
    CHECK(close(lg2[i], answer.lg2) || std::abs(lg2[i] - answer.lg2) <= 0x1p-22f, "lg2(", answer.x,
          ") is ", lg2[i]);
    CHECK(bf16[i] == (uint32_t{answer.bf16} << 16 | 0x3f80), "bf16 of ", answer.x, ": ", std::hex,
          bf16[i]);
    CHECK(f16[i] == (uint32_t{answer.f16} << 16 | 0x3c00), "f16 of ", answer.x, ": ", std::hex,
          f16[i]);
  }
}

// Every number of 16 bits and back, stored by fours.
struct HalfParams {
  float* out;  // [1 << 16]
};
template <typename Params>
__global__ void half_kernel(const Params p) {
  for (unsigned i = 4 * threadIdx.x; i < 1 << 16; i += 128) {
    const auto value = [&](unsigned c) { return cuda::cvt_f32_f16(static_cast<uint16_t>(i + c)); };
    cuda::st_global_v4(p.out + i, {value(0), value(1), value(2), value(3)});
  }
}

inline void test_half_to_float(const Device& device) {
  float* out = device.array(std::vector<float>(1 << 16));
  device.run(half_kernel<HalfParams>, 1, 32, 0, HalfParams{out});
  for (int i = 0; i < 1 << 16; ++i) {
    const int exponent = i >> 10 & 31, fraction = i & 1023;
    float expected = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    if (exponent == 31) expected = fraction == 0 ? INFINITY : NAN;
    if (i >> 15) expected = -expected;
    CHECK(std::isnan(expected) ? std::isnan(out[i])
                               : out[i] == expected && std::signbit(out[i]) == (i >> 15 != 0),
          i, " is ", out[i]);
  }
}

// Pairs of registers.
struct StoreParams {
  uint32_t* out;  // [64]
};
template <typename Params>
__global__ void store_kernel(const Params p) {
  cuda::st_global_v2(p.out + 2 * threadIdx.x, {threadIdx.x, 1000 + threadIdx.x});
}

inline void test_stores(const Device& device) {
  uint32_t* out = device.array(std::vector<uint32_t>(64));
  device.run(store_kernel<StoreParams>, 1, 32, 0, StoreParams{out});
  for (uint32_t i = 0; i < 64; ++i) {
    CHECK(out[i] == i / 2 + (i % 2 == 0 ? 0 : 1000), "word ", i, " is ", out[i]);
  }
}

// Every thread counts twice; the first counter wraps at `limit` and is 0 at the end.
struct CountParams {
  uint32_t* counters;  // [2]: the numbers of the second are not used
  uint32_t* old;       // [blocks, threads]
  uint32_t limit;
};
template <typename Params>
__global__ void count_kernel(const Params p) {
  const unsigned i = blockIdx.x * 64 + threadIdx.x;
  p.old[i] = cuda::atomic_inc_acq_rel(p.counters, p.limit);
  cuda::atomic_inc_acq_rel(p.counters + 1, UINT32_MAX);
}

inline void test_counting(const Device& device) {
  constexpr uint32_t kThreads = 3 * 64;
  uint32_t* counters = device.array(std::vector<uint32_t>(2));
  uint32_t* old = device.array(std::vector<uint32_t>(kThreads, 99));
  device.run(count_kernel<CountParams>, 3, 64, 0, CountParams{counters, old, 47});
  std::vector<int> times(48);
  for (uint32_t i = 0; i < kThreads; ++i) {
    CHECK(old[i] < 48, "thread ", i, ": ", old[i]);
    ++times[old[i]];
  }
  for (int count : times) CHECK(count == 4, count);
  CHECK(counters[0] == 0 && counters[1] == kThreads, counters[0], " ", counters[1]);
}

// A message from the last block to the first: words, then a flag. Both read the clock.
struct MessageParams {
  uint64_t* words;  // [32]
  uint64_t* flag;
  uint64_t* out;    // [32]
  uint64_t* times;  // [2, 32]
};
template <typename Params>
__global__ void message_kernel(const Params p) {
  const unsigned i = threadIdx.x;
  const uint64_t begin = cuda::globaltimer();
  if (blockIdx.x == 1) {
    p.words[i] = (uint64_t{7} << 40) + i;
    __syncthreads();
    if (i == 0) cuda::store_release_system(p.flag, uint64_t{5} << 33);
    return;
  }
  while (cuda::load_acquire_system(p.flag) != uint64_t{5} << 33) {
  }
  p.out[i] = p.words[i];
  while (cuda::globaltimer() < begin + 100'000) {
  }
  p.times[i] = begin;
  p.times[32 + i] = cuda::globaltimer();
}

inline void test_messages(const Device& device) {
  uint64_t* words = device.array(std::vector<uint64_t>(32));
  uint64_t* flag = device.array(std::vector<uint64_t>(1));
  uint64_t* out = device.array(std::vector<uint64_t>(32));
  uint64_t* times = device.array(std::vector<uint64_t>(64));
  device.run(message_kernel<MessageParams>, 2, 32, 0, MessageParams{words, flag, out, times});
  for (uint64_t i = 0; i < 32; ++i) {
    CHECK(out[i] == (uint64_t{7} << 40) + i, i, ": ", out[i]);
    CHECK(times[i] < times[32 + i] && times[32 + i] - times[i] < 1'000'000'000, i, ": ", times[i],
          " ", times[32 + i]);
  }
}

struct ShuffleParams {
  int64_t* out;  // [6, 32]
};
template <typename Params>
__global__ void shuffle_kernel(const Params p) {
  const int lane = threadIdx.x;
  const int64_t value = (int64_t{1} << 40) + lane;
  p.out[lane] = __shfl_sync(0xffffffff, value, (lane + 5) % 32);
  p.out[32 + lane] = static_cast<int64_t>(__shfl_sync(0xffffffff, 10.0f + lane, 6, 8));
  p.out[64 + lane] = __shfl_up_sync(0xffffffff, lane, 3);
  p.out[96 + lane] = __shfl_xor_sync(0xffffffff, lane, 9);
  p.out[128 + lane] = __any_sync(0xffffffff, lane == 17) != 0;
  p.out[160 + lane] = __clz(lane) + 32 * (__any_sync(0xffffffff, 0) != 0);
}

inline void test_shuffles(const Device& device) {
  int64_t* out = device.array(std::vector<int64_t>(6 * 32));
  device.run(shuffle_kernel<ShuffleParams>, 1, 32, 0, ShuffleParams{out});
  for (int lane = 0; lane < 32; ++lane) {
    CHECK(out[lane] == (int64_t{1} << 40) + (lane + 5) % 32, lane, " ", out[lane]);
    CHECK(out[32 + lane] == 10 + lane / 8 * 8 + 6, lane, " ", out[32 + lane]);
    CHECK(out[64 + lane] == (lane < 3 ? lane : lane - 3), lane, " ", out[64 + lane]);
    CHECK(out[96 + lane] == (lane ^ 9), lane, " ", out[96 + lane]);
    const int zeros = lane == 0 ? 32 : 31 - std::ilogb(lane);
    CHECK(out[128 + lane] == 1 && out[160 + lane] == zeros, lane);
  }
}

// Adds one, after some time; a launch that is early must not see what was there before.
struct ChainParams {
  const uint32_t* in;  // [32]
  uint32_t* out;       // like in
};
template <typename Params>
__global__ void chain_kernel(const Params p) {
  cuda::griddepcontrol_launch_dependents();
  cuda::griddepcontrol_wait();
  const uint64_t begin = cuda::globaltimer();
  while (cuda::globaltimer() - begin < 50'000) {
  }
  p.out[threadIdx.x] = p.in[threadIdx.x] + 1;
}

inline void test_early_launches(const Device& device) {
  uint32_t* words = device.array(std::vector<uint32_t>(4 * 32));
  for (int i = 0; i < 3; ++i) {
    const ChainParams params{words + 32 * i, words + 32 * (i + 1)};
    CHECK(cuda::launch_kernel(chain_kernel<ChainParams>, 1, 32, 0, nullptr, params, true) ==
              cudaSuccess,
          "launch");
  }
  device.synchronize();
  for (int i = 0; i < 32; ++i) CHECK(words[96 + i] == 3, "word ", i, " is ", words[96 + i]);
}

// Each block of a cluster reads what the next one has in its shared memory, a word and four.
struct ClusterParams {
  float* out;  // [blocks, threads, 2]
};
template <typename Params>
__global__ void cluster_kernel(const Params p) {
  if constexpr (cuda::kHasClusters) {
    auto* const words = reinterpret_cast<float*>(cuda::dynamic_shared_memory());
    const int i = threadIdx.x, block = blockIdx.x;
    words[i] = static_cast<float>(100 * block + i);
    cuda::barrier_cluster();
    const uint32_t next = (block + 1) % 4;
    float four[4];
    cuda::ld_shared_cluster_v4(four,
                               cuda::mapa(cuda::shared_address(words + (63 - i) / 4 * 4), next));
    float* const out = p.out + 2 * (64 * block + i);
    out[0] = cuda::ld_shared_cluster(cuda::mapa(cuda::shared_address(words + 63 - i), next));
    out[1] = four[0] + 2 * four[1] + 4 * four[2] + 8 * four[3];
    cuda::barrier_cluster();
    words[i] = -1.0f;
  }
}

// Clusters of four, where the code was written for devices that have them.
inline void test_clusters(const Device& device) {
  constexpr int kBlocks = 12;
  int ptx_version = 0;
  CHECK(cuda::find_ptx_version(cluster_kernel<ClusterParams>, &ptx_version) == cudaSuccess,
        "version");
  if (ptx_version < 90) return;
  float* out = device.array(std::vector<float>(2 * 64 * kBlocks));
  CHECK(cuda::launch_kernel(cluster_kernel<ClusterParams>, kBlocks, 64, 256, nullptr,
                            ClusterParams{out}, false, 4) == cudaSuccess,
        "launch");
  device.synchronize();
  for (int i = 0; i < 64 * kBlocks; ++i) {
    const int block = i / 64, next = block / 4 * 4 + (block + 1) % 4, place = 63 - i % 64;
    const auto word = [&](int i) { return static_cast<float>(100 * next + i); };
    const int first = place / 4 * 4;
    CHECK(out[2 * i] == word(place), i, " is ", out[2 * i]);
    CHECK(out[2 * i + 1] ==
              word(first) + 2 * word(first + 1) + 4 * word(first + 2) + 8 * word(first + 3),
          i, " is ", out[2 * i + 1]);
  }
}

inline void test_known_answers(const Device& device) {
  test_copies(device);
  test_words(device);
  test_matrix_loads(device);
  test_matrix_moves(device);
  test_mma(device);
  test_floats(device);
  test_pairs(device);
  test_float8(device);
  test_half_to_float(device);
  test_stores(device);
  test_counting(device);
  test_messages(device);
  test_shuffles(device);
  test_early_launches(device);
  test_clusters(device);
  test_named_barriers(device);
  test_hopper(device);
}

}  // namespace tree_attention::testing
