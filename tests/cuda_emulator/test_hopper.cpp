// SPDX-License-Identifier: BSD-3-Clause
//
// Mistakes with barriers in memory, copies of boxes and products, which the emulator must find.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/device.h"
#include "cuda/matrix_descriptor.cuh"
#include "ptx_known_hopper.cuh"

namespace {

namespace cuda = tree_attention::cuda;
namespace emulator = tree_attention::emulator;
using cuda::kBoxRowBytes;

constexpr int kSeeds = 20, kSharedBytes = 16 * 1024;

struct Params {
  // Of 64 columns, 64 rows and 4 matrices: boxes of eight rows, and of one; a map of 3 dimensions.
  CUtensorMap map, of_row, of_3;
  float* out;  // of each thread
  int which;
};

struct Memory {
  Memory() : in(64 * 64 * 4), out(288, -1.0f) {
    for (size_t i = 0; i < in.size(); ++i) in[i] = cuda::cvt_rn_bf16(static_cast<float>(i % 8));
    const cuuint64_t sizes[] = {64, 64, 4, 1}, strides[] = {128, 128 * 64, 128 * 64 * 4};
    const cuuint32_t box[] = {64, 8, 1, 1}, row[] = {64, 1, 1, 1};
    map = tree_attention::testing::encode(in.data(), 4, sizes, strides, box);
    of_row = tree_attention::testing::encode(in.data(), 4, sizes, strides, row);
    of_3 = tree_attention::testing::encode(in.data(), 3, sizes, strides, box);
  }

  std::vector<uint16_t> in;
  std::vector<float> out;
  CUtensorMap map, of_row, of_3;
};

struct Outcome {
  int errors = 0, nans = 0, wrong = 0;  // of all seeds
};

// What happens with a mistake; every error must have `text`.
Outcome run(void (*kernel)(Params), int which, float right, int threads, const std::string& text) {
  Outcome outcome;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    emulator::options() = {seed, 1};
    Memory memory;
    try {
      cuda::launch_kernel(kernel, 1, threads, kSharedBytes, nullptr,
                          Params{memory.map, memory.of_row, memory.of_3, memory.out.data(), which});
    } catch (const emulator::Error& error) {
      ++outcome.errors;
      CHECK(std::string(error.what()).find(text) != std::string::npos, "'", error.what(),
            "' instead of '", text, "', mistake ", which);
      continue;
    }
    bool nan = false, wrong = false;
    for (int i = 0; i < threads; ++i) {
      nan = nan || std::isnan(memory.out[i]);
      wrong = wrong || !(memory.out[i] == right);
    }
    outcome.nans += nan;
    outcome.wrong += wrong;
  }
  return outcome;
}

void expect_right(void (*kernel)(Params), int which, float right, int threads = 64) {
  const Outcome outcome = run(kernel, which, right, threads, "no error");
  CHECK(outcome.errors == 0 && outcome.wrong == 0, "no mistake, ", which);
}
void expect_error(const std::string& text, void (*kernel)(Params), int which, int threads = 64) {
  const Outcome outcome = run(kernel, which, 0.0f, threads, text);
  CHECK(outcome.errors == kSeeds, outcome.errors, " errors '", text, "'");
}
// In some of the orders of threads; as an error, if it is one, with this text.
void expect_nan(void (*kernel)(Params), int which, int threads = 64,
                const std::string& text = "no error") {
  const Outcome outcome = run(kernel, which, 0.0f, threads, text);
  CHECK(outcome.nans + outcome.errors > 0, "mistake ", which, " was not found");
}

void wait(uint32_t barrier, uint32_t parity) {
  while (!cuda::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Thread 0 copies 128 bytes, four times through one place; all read 1 from it.
enum BarrierMistake {
  kNone,
  kNoInit,
  kNoFence,
  kNoExpect,
  kLessExpected,
  kNoLoop,
  kNoEmpty,
  kSameParity,
  kOverwritten,
  kTwice,
  kNoArrival,
  kSecondArrival,
  kNoWait,
  kParityOf2,
  kNoCount,
  kManyBytes,
};
void copy_four_times(Params p) {
  char* const memory = cuda::dynamic_shared_memory();
  const uint32_t place = cuda::shared_address(memory), full = place + 1024, empty = full + 8;
  const unsigned i = threadIdx.x;
  const auto is = [&](BarrierMistake mistake) { return p.which == mistake; };
  if (i == 0) {
    if (!is(kNoInit)) cuda::mbarrier_init(full, is(kNoCount) ? 0 : 1);
    if (is(kTwice)) cuda::mbarrier_init(full, 1);
    cuda::mbarrier_init(empty, 64);
    if (!is(kNoFence)) cuda::fence_mbarrier_init();
    if (is(kOverwritten)) memory[1027] = 0;
  }
  __syncthreads();
  float sum = 0.0f;
  for (uint32_t round = 0; round < 4; ++round) {
    const uint32_t parity = is(kParityOf2) ? 2 : is(kSameParity) ? 0 : round % 2;
    if (i == 0) {
      if (!is(kNoEmpty)) wait(empty, round % 2 ^ 1);
      const uint32_t bytes = is(kLessExpected) ? 64 : is(kManyBytes) ? 1 << 20 : 128;
      if (is(kNoExpect)) {
        cuda::mbarrier_arrive(full);
      } else if (!is(kNoArrival)) {
        cuda::mbarrier_arrive_expect_tx(full, bytes);
      }
      if (is(kSecondArrival)) cuda::mbarrier_arrive(full);
      cuda::cp_async_bulk_tensor_4d(place, &p.of_row, 0, 0, 0, 0, full);
    }
    if (is(kNoLoop)) {
      cuda::mbarrier_try_wait_parity(full, parity);
    } else if (!is(kNoWait)) {
      wait(full, parity);
    }
    sum += cuda::cvt_f32_bf16(reinterpret_cast<const uint16_t*>(memory)[1]);
    cuda::mbarrier_arrive(empty);
  }
  p.out[i] = sum / 4;
}

// A thread that comes to a phase when two more have ended.
void wait_late(Params p) {
  const uint32_t barrier = cuda::shared_address(cuda::dynamic_shared_memory());
  if (threadIdx.x == 0) cuda::mbarrier_init(barrier, 1);
  __syncthreads();
  if (threadIdx.x == 0) cuda::mbarrier_arrive(barrier);
  wait(barrier, 0);
  __syncthreads();
  for (int i = 0; i < 1 + p.which && threadIdx.x == 0; ++i) cuda::mbarrier_arrive(barrier);
  __syncthreads();
  wait(barrier, 1);
  p.out[threadIdx.x] = 1.0f;
}

// A box of eight rows; thread i reads the first columns of row i % 8.
enum BoxMistake {
  kNoBoxMistake,
  kNotAligned,
  kBeyond,
  kRank,
  kNoMap,
  kWithoutProxyFence,
  kFenced,
  kEnds,
};
void copy_box(Params p) {
  char* const memory = cuda::dynamic_shared_memory();
  const uint32_t place = cuda::shared_address(memory), barrier = place + 2048;
  const auto is = [&](BoxMistake mistake) { return p.which == mistake; };
  const unsigned i = threadIdx.x;
  if (i == 0) {
    cuda::mbarrier_init(barrier, 1);
    cuda::fence_mbarrier_init();
    if (is(kWithoutProxyFence) || is(kFenced)) memory[5] = 1;
    if (is(kFenced)) cuda::fence_proxy_async();
    const uint32_t to = is(kNotAligned) ? place + 512 : is(kBeyond) ? place + kSharedBytes : place;
    const CUtensorMap none{};
    const CUtensorMap& map = is(kNoMap) ? none : is(kRank) ? p.of_3 : p.map;
    cuda::mbarrier_arrive_expect_tx(barrier, 8 * kBoxRowBytes);
    cuda::cp_async_bulk_tensor_4d(to, &map, 0, 0, 1, 0, barrier);
  }
  __syncthreads();
  if (!is(kEnds)) wait(barrier, 0);
  const int row = static_cast<int>(i % 8);
  uint16_t element;
  std::memcpy(&element, memory + cuda::swizzled(row, 2), 2);
  p.out[i] = cuda::cvt_f32_bf16(element);
}

// Products of ones: 16 in each element.
enum ProductMistake {
  kRightProduct,
  kNoProxyFence,
  kNoBarrier,
  kNoWgmmaFence,
  kNoCommit,
  kWeakWait,
  kReadEarly,
  kWritten,
  kOverwrittenEarly,
  kStride,
  kSecondRow,
  kNoSwizzle,
  kBaseOffset,
  kBeyondRow,
  kOutside,
  kOtherOperands,
  kOneFewer,
  kOtherLane,
  kMWithinBox,
  kOtherAccumulators,
};
void multiply_ones(Params p) {
  char* const memory = cuda::dynamic_shared_memory();
  const auto is = [&](ProductMistake mistake) { return p.which == mistake; };
  const unsigned i = threadIdx.x;
  const uint16_t one = cuda::cvt_rn_bf16(1.0f);
  const auto fill = [&](uint16_t value) {
    for (unsigned j = i; j < 80 * kBoxRowBytes / 2; j += blockDim.x) {
      reinterpret_cast<uint16_t*>(memory)[j] = value;
    }
  };
  fill(one);
  if (!is(kNoProxyFence)) cuda::fence_proxy_async();
  if (!is(kNoBarrier)) __syncthreads();
  uint32_t a = cuda::shared_address(memory), b = a + 64 * kBoxRowBytes;
  if (is(kSecondRow)) a += kBoxRowBytes;
  if (is(kBeyondRow)) a += 112;
  if (is(kOutside)) b += kSharedBytes;
  if (is(kOtherOperands) && i >= 96) a += 32;
  if (is(kOtherLane) && i == 100) a += 32;
  uint64_t descriptor_a = cuda::matrix_descriptor(a, is(kStride) ? 2048 : 1024);
  if (is(kNoSwizzle)) descriptor_a &= ~(uint64_t{3} << 62);
  if (is(kBaseOffset)) descriptor_a |= uint64_t{1} << 49;
  const uint64_t descriptor_b = cuda::matrix_descriptor(b);
  float registers[12] = {};
  const auto from = [&](int i) -> float (&)[8] {
    return reinterpret_cast<float (&)[8]>(registers[i]);
  };
  float (&d)[8] = from(0);
  if (!is(kNoWgmmaFence)) cuda::wgmma_fence();
  if (is(kMWithinBox)) {
    const uint64_t within = cuda::matrix_descriptor(a + 32);
    cuda::wgmma_m64k16_bf16<true>(d, within, descriptor_b);
  }
  if (!is(kOneFewer) || i < 96) {
    cuda::wgmma_m64k16_bf16<false>(d, descriptor_a, descriptor_b);
  }
  if (is(kOtherAccumulators)) {
    cuda::wgmma_m64k16_bf16<false>(from(4), descriptor_a, descriptor_b);
  }
  if (is(kReadEarly)) p.out[i] = d[0];
  if (is(kWritten)) d[0] = 0.0f;
  if (is(kOverwrittenEarly)) fill(0);
  if (!is(kNoCommit)) cuda::wgmma_commit_group();
  if (is(kWeakWait)) {
    cuda::wgmma_wait_group<1>();
    p.out[i] = d[0];
  }
  cuda::wgmma_wait_group<0>();
  if (!is(kReadEarly) && !is(kWeakWait)) p.out[i] = d[0] + d[1] + d[2] + d[3];
}

// Two products to the same accumulators, of which the first is waited for alone, and one to others.
void multiply_in_turn(Params p) {
  char* const memory = cuda::dynamic_shared_memory();
  for (unsigned j = threadIdx.x; j < 80 * kBoxRowBytes / 2; j += blockDim.x) {
    reinterpret_cast<uint16_t*>(memory)[j] = cuda::cvt_rn_bf16(1.0f);
  }
  cuda::fence_proxy_async();
  __syncthreads();
  const uint32_t begin = cuda::shared_address(memory);
  const uint64_t a = cuda::matrix_descriptor(begin), b = cuda::matrix_descriptor(begin + 64 * 128);
  float d[8], e[8] = {};
  std::fill_n(d, 8, 1.0f);
  cuda::wgmma_fence();
  for (int i = 0; i < 3; ++i) {
    const bool of_e = i == (p.which == 1 ? 0 : 2);
    if (of_e) {
      cuda::wgmma_m64k16_bf16<false>(e, a, b);
    } else {
      cuda::wgmma_m64k16_bf16<true>(d, a, b);
    }
    cuda::wgmma_commit_group();
  }
  cuda::wgmma_wait_group<2>();
  const bool first_is_nan = std::isnan(d[0]);  // the second adds to it
  const bool e_is_given = !std::isnan(e[0]);
  cuda::wgmma_wait_group<0>();
  const bool right = first_is_nan && e_is_given == (p.which == 1) && d[0] == 33 && e[3] == 16;
  p.out[threadIdx.x] = right ? 1.0f : 0.0f;
}

void meet(Params p) {
  const unsigned i = threadIdx.x;
  if (p.which == 1) cuda::bar_sync(0, 64);
  if (p.which == 2) cuda::bar_sync(16, 64);
  if (p.which == 3) cuda::bar_sync(1, 48);
  if (p.which == 4 && i >= 32) return;
  if (p.which == 5) cuda::bar_sync(1, i < 32 ? 64 : 96);
  if (p.which == 6 && i < 32) cuda::bar_red_or(1, 64, true);
  cuda::bar_sync(1, 64);
  p.out[i] = 1.0f;
}

void multiply_with_two_warps(Params) { cuda::wgmma_fence(); }

}  // namespace

void test_barriers_in_memory() {
  expect_right(copy_four_times, kNone, 1.0f);
  expect_error("no barrier was initialised at 1024", copy_four_times, kNoInit);
  expect_error("a copy uses a barrier that no fence.mbarrier_init has followed", copy_four_times,
               kNoFence);
  expect_nan(copy_four_times, kNoExpect, 64, "bytes");
  expect_error("more bytes have come than the phase was to wait for", copy_four_times,
               kLessExpected);
  expect_nan(copy_four_times, kNoLoop, 64, "");
  expect_nan(copy_four_times, kNoEmpty, 64, "");
  expect_error("a wait for the parity of a phase that this thread has seen end", copy_four_times,
               kSameParity);
  expect_error("the memory of the barrier at 1024 was overwritten", copy_four_times, kOverwritten);
  expect_error("a barrier is initialised that is one already", copy_four_times, kTwice);
  expect_error("deadlock: threads 0-63 wait for mbarrier.try_wait at test_hopper.cpp",
               copy_four_times, kNoArrival);
  expect_error("an arrival beyond the 1 of the phase", copy_four_times, kSecondArrival);
  expect_nan(copy_four_times, kNoWait, 64, "");
  expect_error("a parity of 2", copy_four_times, kParityOf2);
  expect_error("a barrier of 0 arrivals", copy_four_times, kNoCount);
  expect_error("a barrier counts up to 1048575 bytes", copy_four_times, kManyBytes);
  expect_right(wait_late, 0, 1.0f);
  expect_error("a wait for a phase after which another one of the other parity has ended",
               wait_late, 1);
}

void test_named_barriers() {
  expect_right(meet, 0, 1.0f);
  expect_error("a barrier 0", meet, 1);
  expect_error("a barrier 16", meet, 2);
  expect_error("a barrier of 48 threads", meet, 3);
  expect_error("deadlock: threads 0-31 wait for bar.sync", meet, 4);
  expect_error("others wait at barrier 1 for", meet, 5, 96);
  expect_error("others wait at barrier 1 for 64 threads", meet, 6);
}

void test_box_copies() {
  expect_right(copy_box, kNoBoxMistake, 1.0f);
  expect_right(copy_box, kFenced, 1.0f);
  expect_error("the destination of a copy is no multiple of 1024", copy_box, kNotAligned);
  expect_error("shared address 16384 is outside of the 16384 bytes", copy_box, kBeyond);
  expect_error("a copy of 4 dimensions with a tensor map of 3", copy_box, kRank);
  expect_error("no tensor map is there", copy_box, kNoMap);
  expect_error("threads have written to the destination of a copy without fence.proxy.async",
               copy_box, kWithoutProxyFence);
  expect_nan(copy_box, kEnds, 64, "block 0 ended before this copy");
}

void test_tensor_maps() {
  alignas(16) uint16_t tensor[64];
  struct Arguments {
    cuuint64_t sizes[3] = {64, 4, 4}, strides[2] = {128, 512};
    cuuint32_t box[3] = {64, 4, 1}, element_strides[3] = {1, 1, 1}, rank = 3;
    uint16_t* address;
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  };
  const auto encode = [&](void (*change)(Arguments&)) {
    Arguments a;
    a.address = tensor;
    change(a);
    CUtensorMap map;
    return cuTensorMapEncodeTiled(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, a.rank, a.address, a.sizes, a.strides, a.box,
        a.element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, a.swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CHECK(encode([](Arguments&) {}) == CUDA_SUCCESS, "a tensor map");
  CHECK(encode([](Arguments& a) { a.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE; }) == CUDA_SUCCESS, "");
  const auto refuses = [&](const char* what, void (*change)(Arguments&)) {
    CHECK(encode(change) == CUDA_ERROR_INVALID_VALUE, what);
  };
  refuses("a stride", [](Arguments& a) { a.strides[0] = 136; });
  refuses("a large stride", [](Arguments& a) { a.strides[1] = cuuint64_t{1} << 40; });
  refuses("an address", [](Arguments& a) { a.address += 1; });
  refuses("a box", [](Arguments& a) { a.box[1] = 257; });
  refuses("an empty box", [](Arguments& a) { a.box[2] = 0; });
  refuses("a wide box", [](Arguments& a) { a.box[0] = 72; });
  refuses("a narrow box", [](Arguments& a) { a.box[0] = 4; });
  refuses("no size", [](Arguments& a) { a.sizes[1] = 0; });
  refuses("a step", [](Arguments& a) { a.element_strides[1] = 9; });
  refuses("a rank", [](Arguments& a) { a.rank = 6; });
  void* function = tensor;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuNothing", &function, 12000, cudaEnableDefault, &result);
  CHECK(function == nullptr && result == cudaDriverEntryPointSymbolNotFound, "an entry point");
}

void test_products() {
  const auto expect = [](const char* text, ProductMistake mistake) {
    expect_error(text, multiply_ones, mistake, 128);
  };
  expect_right(multiply_ones, kRightProduct, 64.0f, 128);
  expect_right(multiply_in_turn, 0, 1.0f, 128);
  expect_right(multiply_in_turn, 1, 1.0f, 128);
  expect("what threads have written without fence.proxy.async", kNoProxyFence);
  expect_nan(multiply_ones, kNoBarrier, 128, "fence.proxy.async");
  expect("registers may have been touched since the last wgmma.fence", kNoWgmmaFence);
  expect("a warp ends with products that it has not waited for", kNoCommit);
  for (const ProductMistake mistake : {kWeakWait, kReadEarly}) {
    const Outcome outcome = run(multiply_ones, mistake, 0.0f, 128, "no error");
    CHECK(outcome.nans == kSeeds, outcome.nans, " seeds with NaN");
  }
  expect("an accumulator was written while a product was under way", kWritten);
  expect_nan(multiply_ones, kOverwrittenEarly, 128, "fence.proxy.async");
  expect_nan(multiply_ones, kStride, 128, "fence.proxy.async");
  expect("a matrix begins in a row of its box that is not the first of eight", kSecondRow);
  expect("only the swizzle of 128 bytes is emulated", kNoSwizzle);
  expect("bits of a descriptor that are no field here", kBaseOffset);
  expect("k runs over the end of the rows of a box", kBeyondRow);
  expect("is outside of the 16384 bytes", kOutside);
  expect("another warp of the warpgroup has issued", kOtherOperands);
  expect("of the warpgroup", kOneFewer);
  expect("lanes give a product other operands", kOtherLane);
  expect("m begins within a box", kMWithinBox);
  expect("accumulators of a product under way in another order or number", kOtherAccumulators);
  expect_error("a warpgroup is four warps, of which the block has not all", multiply_with_two_warps,
               0);
}
