// SPDX-License-Identifier: BSD-3-Clause
//
// Kernels with a mistake each, which the emulator must find.
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/device.h"

namespace {

namespace cuda = tree_attention::cuda;
namespace emulator = tree_attention::emulator;

constexpr int kSeeds = 20;

struct Params {
  const float* in;
  float* out;
  uint32_t* flag;
  int which;
};

// Memory of a kernel: inputs are their index, outputs -1.
struct Memory {
  explicit Memory(int size) : in(size), out(size, -1.0f) {
    for (int i = 0; i < size; ++i) in[i] = static_cast<float>(i);
  }
  Params params(int which = 0) { return {in.data(), out.data(), &flag, which}; }

  std::vector<float> in, out;
  uint32_t flag = 0;
};

using Kernel = void (*)(Params);

std::string error_of(Kernel kernel, const Params& params, int blocks, int threads, int bytes) {
  try {
    cuda::launch_kernel(kernel, blocks, threads, bytes, nullptr, params);
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_error(const std::string& text, Kernel kernel, int which = 0, int blocks = 1,
                  int threads = 64, int bytes = 1024, int resident_blocks = 2) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    emulator::options() = {seed, resident_blocks};
    Memory memory(512);
    const std::string error = error_of(kernel, memory.params(which), blocks, threads, bytes);
    CHECK(error.find(text) != std::string::npos, "'", error, "' instead of '", text, "'");
    CHECK(error.find("test_detection.cpp:") != std::string::npos || bytes == 64, error);
  }
}

float* shared_floats() { return reinterpret_cast<float*>(cuda::dynamic_shared_memory()); }

// Every thread copies four numbers and reads a neighbour's first, in two rounds through one buffer.
enum CopyMistake { kNone, kNoWait, kWeakWait, kNoBarrier, kEarlyRefill, kNoLastWait };
void copy_twice(Params p) {
  const int i = threadIdx.x, neighbour = (i + 33) % 64;
  float* buffer = shared_floats();
  for (int round = 0; round < 2; ++round) {
    cuda::cp_async_16(cuda::shared_address(buffer + 4 * i), p.in + 256 * round + 4 * i, 16);
    cuda::cp_async_commit_group();
    if (p.which == kWeakWait) {
      cuda::cp_async_wait_group<1>();
    } else if (p.which != kNoWait && !(p.which == kNoLastWait && round == 1)) {
      cuda::cp_async_wait_group<0>();
    }
    if (p.which != kNoBarrier) __syncthreads();
    p.out[64 * round + i] = buffer[4 * neighbour];
    if (p.which != kEarlyRefill) __syncthreads();
  }
  if (p.which != kNoLastWait) cuda::cp_async_wait_group<0>();
}

void divergent(Params p) {
  const int i = threadIdx.x;
  if (p.which == 0 && i % 2 == 0) __syncwarp();
  if (p.which == 0) __shfl_sync(0xffffffff, i, 0);
  if (p.which == 1 && i < 32) __syncthreads();
  if (p.which == 1) __syncthreads();
  if (p.which == 2 && i == 40) return;
  if (p.which == 2) __syncwarp();
  if (p.which == 3 && i < 40) return;
  if (p.which == 3) __syncthreads();
  if (p.which == 4 && i < 40) __syncthreads();
  if (p.which == 4) __any_sync(0xffffffff, 1);
  if (p.which == 5) __shfl_sync(0xffff, i, 0);
}

// Every block but the first waits for its predecessor in the order of the blocks' numbers.
void wait_for_the_block_before(Params p) {
  while (cuda::load_acquire(p.flag) != blockIdx.x) {
  }
  __syncthreads();
  if (threadIdx.x == 0) cuda::atomic_inc_acq_rel(p.flag, 1000);
}

void wrong_address(Params p) {
  const uint32_t begin = cuda::shared_address(cuda::dynamic_shared_memory());
  uint32_t matrices[4];
  const uint32_t at = p.which == 0 ? 1024 - 8 : p.which == 1 ? 1024 : p.which == 2 ? 1016 : 1024;
  if (p.which < 2) cuda::cp_async_16(begin + at, p.in, 16);
  if (p.which == 2 || p.which == 3) cuda::ldmatrix_x4(matrices, begin + at);
  if (p.which == 4) cuda::cp_async_16(begin, p.in + 1, 16);
  if (p.which == 5) cuda::cp_async_16(begin, p.in, 12);
  if (p.which == 6) cuda::shared_address(p.in);
  if (p.which == 7) cuda::st_global_v4(p.out + 2, {1, 2, 3, 4});
  if (p.which == 8) cuda::st_global_v4(shared_floats(), {1, 2, 3, 4});
  if (p.which == 9) cuda::st_global_v2(reinterpret_cast<uint32_t*>(p.out + 1), {1, 2});
  cuda::cp_async_commit_group();
  cuda::cp_async_wait_group<0>();
}

[[maybe_unused]] void write_beyond(Params p) {
  if (threadIdx.x == 63) shared_floats()[16 + p.which] = 1.0f;
}

void read_uninitialised(Params p) { p.out[threadIdx.x] = shared_floats()[threadIdx.x]; }

// Eight rows of 128 bytes, without and with the exchange that spreads them over the banks.
void load_rows(Params p) {
  const uint32_t row = threadIdx.x % 8, column = threadIdx.x / 8;
  uint32_t matrices[4];
  const uint32_t place = p.which ? column ^ row : column;
  cuda::ldmatrix_x4(matrices,
                    cuda::shared_address(cuda::dynamic_shared_memory()) + 128 * row + 16 * place);
}

// Blocks of a cluster that leave, read or wait as they must not.
void wrong_cluster(Params p) {
  const uint32_t own = cuda::shared_address(shared_floats());
  shared_floats()[threadIdx.x] = 1.0f;
  if (p.which == 0 && blockIdx.x == 1) return;
  if (p.which == 4 && blockIdx.x == 1 && threadIdx.x < 32) __syncthreads();
  cuda::barrier_cluster();
  if (p.which == 1) cuda::mapa(own, 2);
  if (p.which == 2) cuda::ld_shared_cluster(cuda::mapa(own + 1024, 1));
  if (p.which == 3 && blockIdx.x == 1) return;
  // The other block ends at some time.
  for (int i = 0; i < 10'000 && p.which == 3; ++i) {
    cuda::ld_shared_cluster(cuda::mapa(own, 1));
    __syncthreads();
  }
}

void arrive(Params p) {
  if (threadIdx.x == 0) {
    p.out[blockIdx.x] = static_cast<float>(cuda::atomic_inc_acq_rel(p.flag, gridDim.x - 1));
  }
}

}  // namespace

void test_async_copies() {
  for (const CopyMistake mistake : {kNone, kNoWait, kWeakWait, kNoBarrier, kEarlyRefill}) {
    int seeds_with_nan = 0;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      emulator::options() = {seed, 1};
      Memory memory(512);
      cuda::launch_kernel(copy_twice, 1, 64, 1024, nullptr, memory.params(mistake));
      bool right = true, nan = false;
      for (int i = 0; i < 128; ++i) {
        right = right && memory.out[i] == static_cast<float>(i / 64 * 256 + (i + 33) % 64 * 4);
        nan = nan || std::isnan(memory.out[i]);
      }
      CHECK(right == (mistake == kNone), "mistake ", mistake, ", seed ", seed);
      seeds_with_nan += nan;
    }
    CHECK((seeds_with_nan > 0) == (mistake != kNone), "mistake ", mistake);
  }
  expect_error("a thread ends with copies that it has not waited for", copy_twice, kNoLastWait);
}

void test_divergence() {
  expect_error("divergence: others wait for __", divergent, 0);
  expect_error("divergence: others wait for __syncthreads at test_detection.cpp", divergent, 1);
  expect_error("divergence: threads", divergent, 2);
  expect_error("deadlock: threads 0-39 wait for the end; threads 40-63 wait for __syncthreads",
               divergent, 3);
  expect_error("divergence: threads", divergent, 4);
  expect_error("a mask that leaves lanes out", divergent, 5);
}

void test_clusters() {
  const auto expect = [](const std::string& text, int which, int blocks = 2) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      emulator::options() = {seed, 1};
      Memory memory(1);
      std::string error = "no error";
      try {
        cuda::launch_kernel(wrong_cluster, blocks, 64, 1024, nullptr, memory.params(which), false,
                            2);
      } catch (const emulator::Error& found) {
        error = found.what();
      }
      CHECK(error.find(text) != std::string::npos, "'", error, "' instead of '", text, "'");
    }
  };
  expect("no error", 5, 6);
  expect("deadlock: threads 0-63 wait for barrier.cluster", 0);
  expect("the cluster has no block 2", 1);
  expect("shared address 1024 is outside of the 1024 bytes", 2);
  expect("the block whose memory this is has ended", 3);
  expect("deadlock: threads", 4);
  expect("clusters of 2 blocks, of 3", 5, 3);
}

void test_livelock() {
  expect_error("livelock: nothing but acquire loads", wait_for_the_block_before, 0, 40, 32, 0, 1);
  // With all blocks resident they all come to their end.
  Memory memory(1);
  emulator::options() = {0, 40};
  cuda::launch_kernel(wait_for_the_block_before, 40, 32, 0, nullptr, memory.params());
  CHECK(memory.flag == 40, memory.flag);
}

void test_addresses() {
  expect_error("shared address 1016 is no multiple of 16", wrong_address, 0);
  expect_error("shared address 1024 is outside of the 1024 bytes", wrong_address, 1);
  expect_error("shared address 1016 is no multiple of 16", wrong_address, 2);
  expect_error("shared address 1024 is outside of the 1024 bytes", wrong_address, 3);
  expect_error("the source of a copy is no multiple of 16", wrong_address, 4);
  expect_error("a copy of 12 bytes of 16", wrong_address, 5);
  expect_error("not an address in the block's shared memory", wrong_address, 6);
  expect_error("the destination of a store is no multiple of 16", wrong_address, 7);
  expect_error("global memory with an address in shared memory", wrong_address, 8);
  expect_error("the destination of a store is no multiple of 8", wrong_address, 9);
}

void test_shared_memory() {
  Memory memory(64);
  emulator::options() = {};
  cuda::launch_kernel(read_uninitialised, 1, 64, 256, nullptr, memory.params());
  for (float x : memory.out) CHECK(std::isnan(x), x);
#if !defined(__SANITIZE_ADDRESS__)  // which ends the process
  expect_error("wrote beyond its 64 bytes of shared memory", write_beyond, 0, 1, 64, 64);
  expect_error("wrote beyond its 64 bytes of shared memory", write_beyond, 900, 1, 64, 64);
#endif
}

void test_bank_conflicts() {
  Memory memory(1);
  for (const int spread : {0, 1}) {
    emulator::counters() = {};
    cuda::launch_kernel(load_rows, 1, 32, 1024, nullptr, memory.params(spread));
    CHECK(emulator::counters().matrix_loads == 1, emulator::counters().matrix_loads);
    CHECK(emulator::counters().bank_conflicts == (spread ? 0 : 28),
          emulator::counters().bank_conflicts);
  }
}

// Every order of arrival of three blocks is reached; a seed repeats it; any grid comes to its end.
void test_order_of_blocks() {
  for (const int resident_blocks : {1, 2, 3, 5}) {
    std::set<std::vector<float>> orders;
    for (uint64_t seed = 0; seed < 60; ++seed) {
      Memory memory(3), again(3);
      emulator::options() = {seed, resident_blocks};
      cuda::launch_kernel(arrive, 3, 64, 0, nullptr, memory.params());
      cuda::launch_kernel(arrive, 3, 64, 0, nullptr, again.params());
      CHECK(memory.out == again.out && memory.flag == 0, "seed ", seed);
      orders.insert(memory.out);
    }
    CHECK(orders.size() == 6, orders.size(), " orders with ", resident_blocks, " blocks");
    Memory memory(300);
    cuda::launch_kernel(arrive, 300, 32, 0, nullptr, memory.params());
    CHECK(std::set<float>(memory.out.begin(), memory.out.end()).size() == 300, "all blocks ran");
  }
}

void test_launch_errors() {
  const auto expect = [](const std::string& text, int threads) {
    Memory memory(1);
    const std::string error = error_of(arrive, memory.params(), 1, threads, 0);
    CHECK(error == text, error);
  };
  emulator::options() = {};
  expect("blocks are whole warps here, not 33 threads", 33);
  expect("no error", 32);
  emulator::options().resident_blocks = 0;
  expect("no resident blocks", 32);
  emulator::options() = {};
  Memory memory(1);
  CHECK(error_of([](Params p) { error_of(arrive, p, 1, 32, 0); }, memory.params(), 1, 32, 0) ==
            "no error",
        "a kernel may catch");
  const std::string error =
      error_of([](Params p) { cuda::launch_kernel(arrive, 1, 32, 0, nullptr, p); }, memory.params(),
               1, 32, 0);
  CHECK(error == "a launch within a launch", error);
}
