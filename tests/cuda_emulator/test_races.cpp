// SPDX-License-Identifier: BSD-3-Clause
//
// Mistakes that change no result under the emulator and that only ThreadSanitizer sees. The kernel
// of each is run without its mistake by test_synchronised; scripts/sanitize.sh runs the others one
// at a time, by name, and requires a report.
#include <vector>

#include "check.h"
#include "cuda/device.h"

namespace {

namespace cuda = tree_attention::cuda;
namespace emulator = tree_attention::emulator;

enum class Mistake { kNone, kNoBarrier, kRelaxed, kNoWarpBarrier, kEarlyRefill, kNoOrder };

struct Params {
  const float* in;
  float* parts;  // [blocks, 64]
  float* sum;
  uint32_t* counter;
  Mistake mistake;
};

// The last block to arrive adds what all have stored.
void last_arriver(Params p) {
  const unsigned i = threadIdx.x;
  p.parts[64 * blockIdx.x + i] = static_cast<float>(i);
  if (p.mistake != Mistake::kNoBarrier) __syncthreads();
  uint32_t* last = reinterpret_cast<uint32_t*>(cuda::dynamic_shared_memory());
  if (i == 0) {
    *last = p.mistake == Mistake::kRelaxed
                ? __atomic_fetch_add(p.counter, 1, __ATOMIC_RELAXED) == gridDim.x - 1
                : cuda::atomic_inc_acq_rel(p.counter, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (*last == 0 || i != 0) return;
  for (unsigned k = 0; k < 64 * gridDim.x; ++k) *p.sum += p.parts[k];
}

// Lanes exchange numbers through shared memory; a shuffle is no barrier.
void exchange(Params p) {
  float* shared = reinterpret_cast<float*>(cuda::dynamic_shared_memory());
  const int i = threadIdx.x;
  shared[i] = 1.0f;
  __shfl_xor_sync(0xffffffff, i, 1);
  if (p.mistake != Mistake::kNoWarpBarrier) __syncwarp();
  const float other = shared[i ^ 1];
  __syncthreads();
  if (other == 1.0f && i == 0) *p.sum = 64.0f;
}

// The copy is read as a matrix by another warp; a matrix load orders nothing.
void copy(Params p) {
  char* shared = cuda::dynamic_shared_memory();
  const int i = threadIdx.x;
  uint32_t matrices[4];
  for (int round = 0; round < 2; ++round) {
    cuda::cp_async_16(cuda::shared_address(shared + 16 * i), p.in + 4 * i, 16);
    cuda::cp_async_commit_group();
    cuda::cp_async_wait_group<0>();
    __syncthreads();
    cuda::ldmatrix_x4(matrices, cuda::shared_address(shared + 16 * ((i + 32) % 64)));
    if (p.mistake != Mistake::kEarlyRefill) __syncthreads();
  }
  if (i == 0) *p.sum = 64.0f;
}

// Blocks that take the same place in turn: the order in which they run is no order of memory.
void same_place(Params p) {
  if (threadIdx.x != 0) return;
  if (p.mistake == Mistake::kNoOrder || blockIdx.x == 0) *p.sum = 64.0f;
}

void run(void (*kernel)(Params), Mistake mistake, unsigned blocks) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    std::vector<float> in(256), parts(64 * blocks);
    float sum = 0.0f;
    uint32_t counter = 0;
    emulator::options() = {seed, 1 + static_cast<int>(seed) % 3};
    cuda::launch_kernel(kernel, blocks, 64, 1024, nullptr,
                        Params{in.data(), parts.data(), &sum, &counter, mistake});
    const float expected = kernel == last_arriver ? 2016.0f * blocks : 64.0f;
    CHECK(mistake != Mistake::kNone || sum == expected, sum);
  }
}

}  // namespace

void test_synchronised() {
  run(last_arriver, Mistake::kNone, 4);
  run(exchange, Mistake::kNone, 1);
  run(copy, Mistake::kNone, 1);
  run(same_place, Mistake::kNone, 4);
}

void race_no_barrier() { run(last_arriver, Mistake::kNoBarrier, 4); }
void race_relaxed() { run(last_arriver, Mistake::kRelaxed, 4); }
void race_no_warp_barrier() { run(exchange, Mistake::kNoWarpBarrier, 1); }
void race_early_refill() { run(copy, Mistake::kEarlyRefill, 1); }
void race_no_order() { run(same_place, Mistake::kNoOrder, 4); }
