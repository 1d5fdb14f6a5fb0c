// SPDX-License-Identifier: BSD-3-Clause
//
// The decode kernels on the emulated device: the cases of tests/cpp and more at the edges of tiles,
// row tiles and rings. Beside the results they check that no seed changes a bit, that the counters
// return to zero and that matrix loads have no bank conflicts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "cuda/decode/launch.h"
#include "decode_case.h"
#include "machine.h"

namespace {

using tree_attention::DataType;
using tree_attention::DecodeParams;
using tree_attention::cuda::DeviceLimits;
using tree_attention::cuda::Plan;
using tree_attention::testing::DecodeCase;
using tree_attention::testing::Shape;
namespace cuda = tree_attention::cuda;
namespace emulator = tree_attention::emulator;

constexpr DataType kFloat32 = DataType::kFloat32, kBFloat16 = DataType::kBFloat16,
                   kFloat16 = DataType::kFloat16, kInt8 = DataType::kInt8,
                   kFloat8 = DataType::kFloat8;

// A Hopper, and an Ada, whose rings are shorter.
constexpr DeviceLimits kLarge{4, 228 * 1024, 227 * 1024}, kSmall{4, 100 * 1024, 99 * 1024};

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kShortSeeds = 1;
#else
constexpr int kShortSeeds = 5;
#endif

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void launch(const DecodeParams& params, const DeviceLimits& limits, int cluster_size = 1) {
  Plan plan = cuda::plan_lean_decode(params, limits);
  plan.cluster_size = cluster_size;
  std::vector<uint32_t> counters(plan.workspace.num_counters);
  std::vector<float> partials(plan.workspace.num_partial_floats, NAN);
  emulator::counters() = {};
  CHECK(cuda::launch_lean_decode(params, plan, {counters.data(), partials.data()}, nullptr) ==
            cudaSuccess,
        "launch");
  CHECK(emulator::counters().bank_conflicts == 0, emulator::counters().bank_conflicts,
        " bank conflicts");
  for (size_t i = 0; i < counters.size(); ++i) {
    CHECK(counters[i] == 0, "counter ", i, " ends as ", counters[i]);
  }
}

// Every number of workers on every device, with `num_seeds` orders each.
void check(const Shape& shape, const std::vector<int>& workers,
           const std::vector<DeviceLimits>& devices, int num_seeds, int cluster_size = 1) {
  static uint64_t seed = 0;
  DecodeCase decode(shape, shape.seqlen_k);
  for (const DeviceLimits& limits : devices) {
    for (const int num_workers : workers) {
      std::vector<float> o, lse;
      for (int i = 0; i < num_seeds; ++i, ++seed) {
        emulator::options() = {seed, 1 + static_cast<int>(seed % 5)};
        try {
          decode.check(num_workers,
                       [&](const DecodeParams& params) { launch(params, limits, cluster_size); });
          CHECK(i == 0 || (same_bits(o, decode.o()) && same_bits(lse, decode.lse())),
                "bits depend on the order of execution");
        } catch (const std::runtime_error& error) {
          CHECK(false, "keys ", shape.seqlen_k, ", head_dim ", shape.head_dim, ", queries ",
                shape.seqlen_q, " x ", shape.group_size, ", ", num_workers, " workers of ",
                cluster_size, " blocks, seed ", seed, ": ", error.what());
        }
        o = decode.o();
        lse = decode.lse();
      }
    }
  }
}

bool is_supported(const Shape& shape) {
  return shape.head_dim % 8 == 0 && shape.head_dim_v % 8 == 0;
}

}  // namespace

void test_decode_shared_cases() {
  for (const Shape& shape : tree_attention::testing::shapes()) {
    if (is_supported(shape)) check(shape, {0, 1, 2, 3, 7, 16}, {kLarge, kSmall}, 3);
  }
}

void test_decode_edges() {
  const Shape shapes[] = {
      // One below, at and one above a tile of 128 keys, and of all others.
      {1, 2, 5, 1, 127, 64, 64, kBFloat16},
      {1, 2, 6, 1, 128, 64, 64, kBFloat16},
      {1, 2, 7, 1, 129, 64, 64, kFloat16},
      {1, 1, 8, 1, 65, 128, 128, kFloat16},
      {1, 1, 9, 1, 129, 64, 64, kBFloat16},
      {1, 1, 16, 1, 65, 128, 128, kFloat16},
      {1, 1, 17, 1, 65, 96, 96, kBFloat16},
      {1, 1, 33, 1, 65, 256, 256, kBFloat16},
      {1, 1, 9, 1, 33, 256, 192, kFloat16},
      {1, 1, 2, 1, 65, 64, 64, kFloat32},
      {1, 1, 2, 1, 40, 96, 128, kFloat32},
      {1, 1, 2, 1, 20, 256, 256, kFloat32},
      // Narrower than their kernel.
      {1, 1, 4, 1, 200, 8, 16, kBFloat16},
      {1, 1, 4, 1, 100, 104, 72, kFloat16},
      // Several times round the ring, across outputs.
      {2, 2, 4, 1, 1157, 64, 64, kBFloat16, 0, false, 0.0f, true},
      {1, 3, 4, 1, 700, 256, 256, kFloat16},
      {1, 2, 1, 1, 500, 64, 64, kFloat32},
      // More rows than a tile has.
      {1, 2, 3, 50, 200, 64, 64, kBFloat16, 0, true, 3.0f, true},
      {1, 1, 2, 40, 200, 256, 256, kBFloat16, 0, false, 0.0f, true},
      {1, 1, 1, 20, 90, 128, 128, kFloat32, 0, false, 0.0f, true},
      // Pages of one key, of a part of a tile and of several tiles.
      {2, 2, 4, 2, 150, 64, 64, kBFloat16, 1, false, 0.0f, true},
      {2, 1, 4, 1, 320, 128, 128, kFloat16, 64, true, 0.0f, true},
      {1, 2, 2, 1, 600, 256, 256, kBFloat16, 200, false, 0.0f, false},
      {1, 1, 2, 3, 96, 128, 96, kFloat32, 16, false, 0.0f, true},
      // More sequences than a block has threads.
      {300, 1, 1, 1, 3, 8, 8, kBFloat16, 0, false, 0.0f, true},
      // 8 bits: about a tile; narrower than the kernel; pages of one key; more rows than a tile.
      {1, 2, 5, 1, 257, 64, 64, kBFloat16, 0, false, 0.0f, false, kInt8},
      {1, 2, 5, 1, 255, 64, 48, kFloat16, 0, true, 0.0f, true, kInt8},
      {1, 1, 8, 1, 127, 128, 128, kBFloat16, 0, false, 0.0f, false, kFloat8},
      {1, 1, 16, 1, 128, 128, 128, kBFloat16, 0, false, 0.0f, false, kFloat8},
      {1, 1, 17, 1, 129, 96, 112, kFloat16, 0, false, 3.0f, false, kFloat8},
      {1, 1, 9, 1, 65, 256, 192, kFloat16, 0, false, 0.0f, false, kInt8},
      {1, 1, 33, 1, 130, 256, 256, kBFloat16, 0, false, 0.0f, true, kFloat8},
      {1, 1, 33, 1, 128, 256, 256, kBFloat16, 16, false, 0.0f, false, kInt8},
      {2, 2, 4, 2, 150, 128, 128, kBFloat16, 1, false, 0.0f, true, kInt8},
      {2, 2, 2, 1, 320, 64, 64, kFloat16, 64, false, 0.0f, true, kFloat8},
      {1, 2, 3, 50, 200, 128, 128, kBFloat16, 0, true, 3.0f, true, kInt8},
      {2, 2, 4, 1, 1157, 128, 128, kBFloat16, 0, false, 0.0f, true, kInt8},
  };
  for (const Shape& shape : shapes) check(shape, {0, 1, 3, 5, 40}, {kLarge, kSmall}, 2);
}

// Workers of several blocks: whole outputs and parts, outputs with fewer tiles than a worker has
// blocks, without keys, several times round the ring; pages; ranges with gaps; several rows.
void test_decode_clusters_short() {
  for (const int cluster_size : {2, 4, 8}) {
    check({2, 2, 4, 1, 300, 64, 64, kBFloat16, 0, false, 0.0f, true}, {1, 3}, {kLarge}, kShortSeeds,
          cluster_size);
    check({1, 2, 4, 1, 128 * 17 + 1, 64, 64, kBFloat16}, {1, 3}, {kLarge}, kShortSeeds,
          cluster_size);
    check({1, 1, 2, 6, 400, 64, 48, kBFloat16, 8, true, 2.0f, true}, {2}, {kSmall}, kShortSeeds,
          cluster_size);
    check({2, 2, 4, 1, 0, 64, 64, kBFloat16}, {3}, {kLarge}, 1, cluster_size);
  }
}

// The other kinds of tiles that form clusters.
void test_decode_clusters() {
  for (const int cluster_size : {2, 4, 8}) {
    for (const Shape& shape : std::vector<Shape>{
             {1, 2, 4, 1, 700, 128, 128, kFloat16},
             {1, 1, 16, 1, 700, 128, 104, kBFloat16, 0, false, 0.0f, true},
             {1, 1, 12, 1, 64 * 9, 256, 256, kBFloat16},
             {1, 2, 1, 1, 500, 64, 64, kFloat32},
             {1, 2, 5, 1, 257 * 5, 64, 64, kBFloat16, 0, false, 0.0f, false, kInt8},
             {1, 1, 9, 1, 65 * 7, 256, 192, kFloat16, 0, false, 0.0f, false, kFloat8},
         }) {
      check(shape, {1, 3}, {kLarge, kSmall}, 2, cluster_size);
    }
    Shape latents{2, 1, 16, 1, 450, 576, 512, kBFloat16, 0, false, 0.0f, true};
    latents.latents = true;
    check(latents, {1, 3}, {kLarge}, 2, cluster_size);
  }
}

// So many blocks on one output that they are merged in two levels.
void test_decode_many_workers() {
  check({1, 1, 4, 1, 128 * 90, 64, 64, kBFloat16}, {36, 37, 80, 91}, {kLarge}, 4);
  check({2, 1, 2, 20, 64 * 45, 128, 128, kFloat16, 0, false, 0.0f, true}, {40, 92}, {kLarge}, 3);
}

// For sanitizers, to which a thread of a kernel is expensive, and for mutants of the kernels: only
// bfloat16 and head_dim 64. Several tiles per block and several blocks per output; whole outputs
// that fill the ring one after the other; tiles of 8 rows, of 16 and of two row groups; pages, with
// and without whole tiles; more tiles than a ring has stages, two levels of merges; more sequences
// than a block has threads.
void test_decode_short() {
  check({2, 2, 4, 1, 300, 64, 64, kBFloat16, 0, false, 0.0f, true}, {1, 3}, {kLarge}, kShortSeeds);
  for (const int seqlen_q : {4, 6, 9}) {
    check({1, 1, 2, seqlen_q, 200, 64, 48, kBFloat16, 8, true, 2.0f, true}, {2}, {kSmall},
          kShortSeeds);
  }
  check({1, 2, 4, 1, 24 * 17, 64, 64, kBFloat16, 24}, {2}, {kLarge}, kShortSeeds);
  check({1, 2, 4, 1, 128 * 6 + 1, 64, 64, kBFloat16}, {1, 2}, {kLarge, kSmall}, kShortSeeds);
  check({1, 1, 2, 10, 128 * 5, 64, 64, kBFloat16}, {1}, {kSmall}, kShortSeeds);
  check({1, 1, 1, 1, 128 * 38, 64, 64, kBFloat16}, {38}, {kLarge}, kShortSeeds);
  check({130, 1, 1, 1, 2, 64, 64, kBFloat16, 0, false, 0.0f, true}, {2, 7}, {kLarge}, kShortSeeds);
}

// Keys and values of 8 bits with bfloat16 and head_dim 64: several tiles per block and several
// blocks per output; more tiles than a ring has stages; ranges with gaps; pages; tiles of 8 rows,
// of 16 and of four row groups; NaN that some rows of a tile see.
void check_8_bits_short(DataType kv_dtype) {
  const auto check_shape = [&](Shape shape, const std::vector<int>& workers,
                               const std::vector<DeviceLimits>& devices) {
    shape.kv_dtype = kv_dtype;
    check(shape, workers, devices, kShortSeeds);
  };
  check_shape({2, 2, 4, 1, 600, 64, 64, kBFloat16, 0, false, 0.0f, true}, {1, 3}, {kLarge});
  for (const int seqlen_q : {4, 9}) {
    check_shape({1, 1, 2, seqlen_q, 300, 64, 48, kBFloat16, 10, true, 2.0f, true}, {2}, {kSmall});
  }
  check_shape({1, 1, 4, 1, 24 * 22, 64, 64, kBFloat16, 24}, {1}, {kLarge});
  check_shape({1, 2, 4, 1, 256 * 5 + 1, 64, 64, kBFloat16}, {1, 2}, {kLarge, kSmall});
  for (const int seqlen_q : {7, 9}) {
    Shape with_nan{1, 2, 1, seqlen_q, 300, 64, 64, kBFloat16, 0, false, 0.0f, true};
    with_nan.nan = true;
    check_shape(with_nan, {2}, {kLarge});
  }
}

void test_decode_int8_short() { check_8_bits_short(kInt8); }
void test_decode_float8_short() { check_8_bits_short(kFloat8); }

namespace {

// What is asked of the keys and values of a call whose queries are `seqlen_q` tokens of two heads.
struct Reads {
  Plan plan;
  std::vector<std::vector<const void*>> of_thread;  // [block * threads]
};

Reads reads_of(int seqlen_q, uint64_t seed) {
  const Shape shape{2, 2, 2, seqlen_q, 128 * 3, 64, 64, kBFloat16};
  DecodeCase decode(shape, 0);
  std::vector<emulator::Request> requests;
  Reads reads{};
  decode.check(0, [&](const DecodeParams& params) {
    emulator::options() = {seed, 4, &requests};
    launch(params, kLarge);
    emulator::options() = {};
    reads.plan = cuda::plan_lean_decode(params, kLarge);
    const size_t num_threads = reads.plan.num_workers * reads.plan.num_threads;
    reads.of_thread.resize(num_threads);
    const auto is_query = [&](const void* source) {
      const auto* const q = static_cast<const char*>(params.q);
      return source >= q && source < q + 2 * params.batch * params.q_stride[0];
    };
    for (const emulator::Request& request : requests) {
      if (request.num_bytes == 0 || is_query(request.source)) continue;
      const size_t thread = request.block * reads.plan.num_threads + request.thread;
      reads.of_thread[thread].push_back(request.source);
    }
  });
  return reads;
}

int64_t count(const Reads& reads) {
  int64_t sum = 0;
  for (const auto& of_thread : reads.of_thread) sum += of_thread.size();
  return sum;
}

// The number of workers that share the keys of `row_blocks` blocks of 128 rows.
int64_t num_workers(int row_blocks, int asked = 0) {
  DecodeParams params{};
  params.dtype = params.kv_dtype = kBFloat16;
  params.head_dim = params.head_dim_v = 64;
  params.batch = params.num_heads_q = params.num_heads_kv = 1;
  params.seqlen_q = 128 * row_blocks;
  params.seqlen_k = 1 << 20;
  params.num_workers = asked;
  return cuda::plan_lean_decode(params, {132, 228 * 1024, 227 * 1024}).num_workers;
}

// Blocks of a worker, and workers, on an H100 for `num_heads` kv heads of so many keys and rows.
std::vector<int32_t> clusters(int num_heads, int seqlen_k, int rows = 4, int columns = 128,
                              bool has_clusters = true, int asked = 0) {
  DecodeParams params{};
  params.dtype = params.kv_dtype = kBFloat16;
  params.head_dim = params.head_dim_v = columns;
  if (columns == 576) params.head_dim_v = 512;
  params.batch = params.seqlen_q = 1;
  params.num_heads_kv = num_heads;
  params.num_heads_q = num_heads * rows;
  params.seqlen_k = seqlen_k;
  params.num_workers = asked;
  const Plan plan =
      cuda::plan_lean_decode(params, {132, 228 * 1024, 227 * 1024, true, has_clusters});
  return {plan.cluster_size, plan.num_workers};
}

// Whether the host knows the line of so many outputs of one tile: it counts it in 32 bits.
bool is_cut_by_host(int batch, int num_heads) {
  DecodeParams params{};
  params.dtype = params.kv_dtype = kBFloat16;
  params.head_dim = params.head_dim_v = 64;
  params.batch = batch;
  params.num_heads_q = params.num_heads_kv = num_heads;
  params.seqlen_q = params.seqlen_k = params.key_layout.block = 1;
  const Plan plan = cuda::plan_lean_decode(params, kLarge);
  return cuda::launch_params(params, plan, {}).line.output_length > 0;
}

}  // namespace

// Where several blocks of rows read the same keys, as many workers for each of them ask for the
// same in the same order, so that all but the first find it in the L2.
void test_decode_row_blocks() {
  for (const uint64_t seed : {0, 1}) {
    const Reads one = reads_of(64, seed), two = reads_of(128, seed);
    CHECK(count(one) > 0 && count(two) == 2 * count(one), count(one), " reads of one block, ",
          count(two), " of two");
    CHECK(two.plan.num_workers == 4, two.plan.num_workers, " workers");
    const size_t half = two.of_thread.size() / 2;
    for (size_t thread = 0; thread < half; ++thread) {
      CHECK(two.of_thread[thread] == two.of_thread[half + thread], "thread ", thread,
            " reads alone");
    }
  }
  CHECK(num_workers(1) == 132 && num_workers(2) == 132 && num_workers(5) == 130, "workers");
  CHECK(num_workers(7) == 126 && num_workers(32) == 128, "workers in step");
  CHECK(num_workers(15) == 132 && num_workers(200) == 132, "too few would be left");
  CHECK(num_workers(5, 131) == 131, "workers of the caller");
  CHECK(num_workers(0) == 1, "no queries");
  CHECK(is_cut_by_host(1 << 15, 1 << 10) && !is_cut_by_host(1 << 16, (1 << 16) + 1), "the line");
}

void test_decode_plans_of_clusters() {
  using Plans = std::vector<int32_t>;
  // Outputs that are whole in a cluster: of few keys, and where clusters take nearly all blocks.
  CHECK(clusters(8, 1024) == (Plans{8, 8}), "1k");
  CHECK(clusters(8, 2048) == (Plans{8, 8}), "2k");
  CHECK(clusters(64, 65536) == (Plans{4, 64}), "as many outputs as clusters");
  CHECK(clusters(100, 65536) == (Plans{1, 264}), "too few blocks would work");
  CHECK(clusters(100, 512) == (Plans{2, 100}), "two blocks for each short output");
  CHECK(clusters(30, 1024) == (Plans{1, 255}) && clusters(29, 1024) == (Plans{8, 29}),
        "more clusters of eight than are resident");
  // More parts than are merged at once.
  CHECK(clusters(1, 131072) == (Plans{8, 29}), "one kv head");
  CHECK(clusters(1, 65536, 16, 576) == (Plans{8, 29}), "latents");
  // Neither.
  CHECK(clusters(8, 16384) == (Plans{1, 264}), "16k");
  CHECK(clusters(512, 65536) == (Plans{1, 264}), "more outputs than blocks");
  CHECK(clusters(8, 0) == (Plans{1, 4}), "no keys");
  CHECK(clusters(8, 1024, 17) == (Plans{1, 68}), "many rows");
  CHECK(clusters(8, 1024, 4, 128, false) == (Plans{1, 68}), "a device without clusters");
  CHECK(clusters(8, 1024, 4, 128, true, 64) == (Plans{1, 64}), "workers of the caller");
}

// Parts of more than eight rows are merged by 16: one output has 256 at most, which are two levels.
void test_decode_plans_of_two_levels() {
  using Plans = std::vector<int32_t>;
  CHECK(clusters(1, 65536, 32) == (Plans{1, 256}), "one output of 32 rows");
  CHECK(clusters(1, 65536, 16, 576, false) == (Plans{1, 256}), "latents without clusters");
  CHECK(clusters(1, 65536, 9, 128, false) == (Plans{1, 256}), "nine rows without clusters");
  CHECK(clusters(2, 65536, 32) == (Plans{1, 264}), "two outputs");
  CHECK(clusters(1, 65536, 8, 128, false) == (Plans{1, 264}), "eight rows");
  CHECK(clusters(1, 65536, 32, 128, true, 260) == (Plans{1, 260}), "workers of the caller");
}

namespace {

// Copies of no bytes, too, come from memory that there is.
void check_addresses(const std::vector<Shape>& shapes) {
  for (const Shape& shape : shapes) {
    std::vector<emulator::Request> requests;
    DecodeCase(shape, 0).check(0, [&](const DecodeParams& p) {
      emulator::options() = {0, 4, &requests};
      launch(p, kLarge);
      emulator::options() = {};
      const auto is_in = [](const void* source, const void* memory, const int64_t (&stride)[3],
                            const int64_t (&size)[3], int64_t columns, DataType dtype) {
        const auto* const first = static_cast<const char*>(memory);
        const int num_bytes = columns == 1 ? 4 : 16;  // of a scale, or of a chunk
        int64_t last = columns;
        for (int i = 0; i < 3; ++i) last += (size[i] - 1) * stride[i];
        return memory != nullptr && source >= first &&
               static_cast<const char*>(source) + num_bytes <= first + last * element_size(dtype);
      };
      int64_t num_empty = 0;
      const bool paged = p.page_table != nullptr;
      const int64_t keys[3] = {paged ? p.num_pages : p.batch, p.num_heads_kv,
                               paged ? p.page_size : p.seqlen_k};
      const int64_t queries[3] = {p.batch, p.num_heads_q, p.seqlen_q};
      for (const emulator::Request& request : requests) {
        num_empty += request.num_bytes == 0;
        CHECK(is_in(request.source, p.q, p.q_stride, queries, p.head_dim, p.dtype) ||
                  is_in(request.source, p.k, p.k_stride, keys, p.head_dim, p.kv_dtype) ||
                  is_in(request.source, p.v, p.v_stride, keys, p.head_dim_v, p.kv_dtype) ||
                  is_in(request.source, p.k_scale, p.k_scale_stride, keys, 1, kFloat32) ||
                  is_in(request.source, p.v_scale, p.v_scale_stride, keys, 1, kFloat32),
              "a copy of ", request.num_bytes, " bytes comes from nowhere");
      }
      CHECK(num_empty > 0, "no copy is of no bytes");
    });
  }
}

}  // namespace

// Of ends of ranges, gaps, pages, and columns and rows that the kernel has and the call has not.
void test_decode_addresses_short() {
  check_addresses({{2, 2, 3, 1, 130, 40, 40, kBFloat16},
                   {2, 1, 5, 2, 77, 56, 64, kBFloat16, 0, true, 0.0f, true},
                   {1, 2, 20, 1, 64, 64, 64, kBFloat16, 8}});
}

// And of other kernels; latents of fewer columns.
void test_decode_addresses() {
  test_decode_addresses_short();
  Shape latents{1, 1, 5, 1, 70, 320, 256, kBFloat16};
  latents.latents = true;
  check_addresses({{2, 1, 5, 2, 77, 80, 72, kFloat16, 0, true},
                   {1, 1, 3, 1, 50, 64, 48, kFloat32},
                   {2, 1, 4, 1, 150, 48, 48, kBFloat16, 0, false, 0.0f, true, kInt8},
                   {2, 1, 4, 1, 144, 64, 64, kBFloat16, 24, false, 0.0f, true, kInt8},
                   latents});
}

// Latents of 576 columns, and of fewer than the kernel has: one row group and four, of which some
// have no rows; more tiles than a ring has stages, across outputs; ranges with gaps; pages; several
// blocks per output. The small device has room for 16 rows only.
void test_decode_latents_short() {
  const auto check_shape = [&](Shape shape, const std::vector<int>& workers,
                               const std::vector<DeviceLimits>& devices) {
    shape.latents = true;
    check(shape, workers, devices, kShortSeeds);
  };
  check_shape({2, 1, 16, 1, 150, 576, 512, kBFloat16, 0, false, 0.0f, true}, {1, 3}, {kLarge});
  check_shape({1, 2, 20, 1, 32 * 4, 576, 512, kBFloat16}, {1}, {kLarge, kSmall});
  check_shape({2, 1, 16, 5, 100, 576, 512, kBFloat16, 4, true, 2.0f, true}, {2}, {kLarge});
  check_shape({1, 1, 5, 1, 24 * 4, 320, 256, kBFloat16, 24}, {1, 2}, {kLarge});
}

// The same of float16: 16 rows and 64, ranges with gaps, pages.
void test_decode_float16_latents_short() {
  Shape shape{1, 1, 16, 1, 100, 576, 512, kFloat16, 0, false, 0.0f, true};
  shape.latents = true;
  check(shape, {3}, {kLarge}, kShortSeeds);
  shape = {1, 1, 20, 1, 24 * 3, 576, 512, kFloat16, 24};
  shape.latents = true;
  check(shape, {2}, {kLarge}, kShortSeeds);
}

// Every length about a tile, both dtypes, and blocks of rows; levels of merges.
void test_decode_latents() {
  const auto check_shape = [&](Shape shape, const std::vector<int>& workers) {
    shape.latents = true;
    check(shape, workers, {kLarge, kSmall}, 2);
  };
  for (const int seqlen_k : {0, 1, 31, 32, 33, 65}) {
    check_shape({1, 1, 16, 1, seqlen_k, 576, 512, kFloat16}, {0, 1, 3});
    check_shape({1, 1, 40, 1, seqlen_k, 576, 512, kBFloat16}, {0, 2});
  }
  check_shape({1, 1, 128, 1, 300, 576, 512, kBFloat16}, {0, 1, 5, 40});
  check_shape({1, 1, 128, 1, 200, 576, 512, kFloat16, 8, true, 3.0f, true}, {3});
  check_shape({3, 2, 4, 9, 200, 576, 512, kFloat16, 0, false, 0.0f, true}, {0, 7});
  check_shape({1, 1, 8, 1, 32 * 50, 576, 512, kBFloat16}, {40, 60});
  check_shape({1, 1, 8, 1, 90, 264, 256, kFloat16, 1}, {3});
  check_shape({2, 1, 33, 2, 90, 544, 8, kBFloat16, 0, false, 0.0f, true}, {3});
  Shape with_gap{2, 1, 16, 1, 150, 576, 512, kBFloat16};
  with_gap.gap = 8;
  check_shape(with_gap, {2});
}

// Rows whose o does not fit a stage of the ring at once.
void test_decode_wide() {
  check({1, 1, 4, 20, 70, 128, 96, kBFloat16, 0, false, 0.0f, true}, {2}, {kLarge}, 1);
}

// Column groups, with one step of a tile, two and four.
void test_decode_columns_short() {
  check({1, 2, 4, 1, 64 * 5 + 1, 256, 256, kBFloat16, 0, false, 0.0f, false, kInt8}, {1, 2},
        {kLarge}, kShortSeeds);
  check({1, 1, 12, 1, 64 * 2, 256, 256, kBFloat16, 0, false, 0.0f, false, kInt8}, {1}, {kLarge},
        kShortSeeds);
  check({1, 2, 1, 40, 64 * 3, 256, 144, kBFloat16, 0, false, 0.0f, true, kInt8}, {1}, {kLarge},
        kShortSeeds);
}

// 128 columns, and fewer, with 8 rows.
void test_decode_128_short() {
  for (int page_size : {0, 5}) {
    check({1, 1, 2, 1, 150, 96, 96, kBFloat16, page_size}, {2}, {kLarge}, 1);
  }
  check({1, 1, 4, 2, 64 * 4 + 1, 128, 128, kBFloat16, 0, false, 0.0f, true}, {2}, {kLarge}, 1);
}

// The other kinds of tiles, and the other ways to share out a tile's copies.
void test_decode_short_kinds() {
  test_decode_wide();
  test_decode_128_short();
  for (int page_size : {0, 5}) {
    check({1, 1, 2, 1, 70, 256, 256, kFloat32, page_size}, {2}, {kLarge}, 1);
  }
  check({1, 1, 20, 1, 100, 256, 256, kFloat16}, {3}, {kLarge}, 1);
  check({1, 1, 2, 1, 150, 64, 64, kFloat32}, {2}, {kSmall}, 1);
  check({1, 1, 4, 5, 150, 128, 96, kBFloat16, 0, false, 0.0f, true, kInt8}, {2}, {kLarge}, 1);
  check({1, 1, 4, 1, 150, 128, 128, kFloat16, 5, false, 0.0f, true, kFloat8}, {2}, {kLarge}, 1);
}

namespace {

// A Hopper on which the kernel of wgmma runs.
constexpr DeviceLimits kHopper{4, 228 * 1024, 227 * 1024, true, true, true};

// Of more than 256 columns they are those of latents.
void check_wgmma(Shape shape, const std::vector<int>& workers, int num_seeds) {
  shape.latents = shape.head_dim > 256;
  DecodeCase decode(shape, 0);
  CHECK(cuda::plan_lean_decode(decode.params(0), kHopper).uses_wgmma, "another kernel");
  check(shape, workers, {kHopper}, num_seeds);
}

bool uses_wgmma(const Shape& shape) {
  DecodeCase decode(shape, 0);
  return cuda::plan_lean_decode(decode.params(0), kHopper).uses_wgmma;
}

}  // namespace

// Latents by wgmma: a tile and less; ends of ranges, whose other keys are NaN; more tiles than the
// ring has stages; several blocks per output and several outputs per block; 16 rows, 32 and blocks
// of them, of which some do not exist; ranges with gaps, soft-cap and ALiBi.
void test_decode_wgmma_short() {
  check_wgmma({2, 1, 16, 1, 200, 576, 512, kBFloat16, 0, false, 0.0f, true}, {1, 3}, 2);
  check_wgmma({1, 1, 16, 1, 64 * 5 + 2, 576, 512, kBFloat16}, {1}, 2);
  check_wgmma({1, 2, 11, 2, 150, 320, 256, kBFloat16, 0, true, 2.0f, true}, {2}, 1);
  check_wgmma({1, 1, 40, 1, 100, 576, 512, kBFloat16, 0, false, 0.0f, true}, {2}, 1);
}

// The same of 17 to 64 rows of keys and values of their own; more tokens than a warp has lanes.
void test_decode_wgmma_rows_short() {
  check_wgmma({3, 1, 20, 1, 200, 64, 64, kBFloat16, 0, false, 0.0f, true}, {2}, 1);
  for (const int seqlen_k : {190, 210, 230}) {
    check_wgmma({1, 1, 9, 2, seqlen_k, 64, 64, kBFloat16, 0, false, 0.0f, true}, {2}, 1);
  }
  check_wgmma({1, 2, 1, 40, 400, 64, 64, kBFloat16, 0, false, 0.0f, true}, {2}, 1);
  check_wgmma({2, 1, 4, 8, 200, 64, 64, kBFloat16, 0, false, 0.0f, true}, {1, 3}, 2);
  check_wgmma({1, 2, 20, 1, 64 * 5 + 2, 64, 64, kBFloat16}, {1}, 2);
  check_wgmma({1, 2, 11, 5, 150, 56, 40, kBFloat16, 0, true, 2.0f, true}, {2}, 1);
}

// Pages of a run of a tile, of a part that is no power of two, and of several tiles; ranges that
// begin and end within a run, or are empty; gaps.
void test_decode_wgmma_pages_short() {
  for (const int page_size : {16, 48, 64, 96}) {
    check_wgmma({3, 2, 20, 1, 288 + 96 * (page_size == 64), 64, 64, kBFloat16, page_size, false,
                 0.0f, true},
                {2}, 1);
  }
  check_wgmma({2, 1, 6, 6, 224, 64, 56, kBFloat16, 32, true, 2.0f, true}, {1, 3}, 2);
  check_wgmma({1, 1, 40, 1, 64 * 9, 64, 64, kBFloat16, 16}, {1, 2}, 1);
}

// More tokens than a warp has lanes, in pages. The second tile begins after key 189, the first that
// token 31 sees, and ahead of key 197, the first of token 39.
void test_decode_wgmma_tokens() {
  Shape shape{1, 1, 1, 40, 384, 64, 64, kBFloat16, 64};
  shape.window = 187;
  check_wgmma(shape, {1}, 1);
}

// The driver's function for tensor maps is asked for again where it was not found.
void test_decode_wgmma_again() {
  const Shape shape{1, 1, 20, 1, 64, 64, 64, kBFloat16};
  DecodeCase decode(shape, 0);
  const DecodeParams params = decode.params(0);
  const Plan plan = cuda::plan_lean_decode(params, kHopper);
  has_driver_functions = false;
  const cudaError_t error = cuda::launch_lean_decode(params, plan, {}, nullptr);
  has_driver_functions = true;
  CHECK(error == cudaErrorNotSupported, "error ", error);
  check_wgmma(shape, {0}, 1);
}

// Every length about a tile, both dtypes, blocks of rows, levels of merges, and fewer columns.
void test_decode_wgmma() {
  for (const int seqlen_k : {1, 63, 64, 65, 129}) {
    check_wgmma({1, 1, 16, 1, seqlen_k, 576, 512, kFloat16}, {0, 1, 3}, 2);
    check_wgmma({1, 1, 20, 1, seqlen_k, 576, 512, kBFloat16}, {0, 2}, 2);
  }
  check_wgmma({1, 1, 128, 1, 300, 576, 512, kBFloat16}, {0, 1, 5, 40}, 2);
  check_wgmma({1, 1, 128, 1, 200, 576, 512, kFloat16, 0, true, 3.0f, true}, {3}, 2);
  check_wgmma({3, 2, 4, 9, 200, 576, 512, kFloat16, 0, false, 0.0f, true}, {0, 7}, 2);
  check_wgmma({1, 1, 8, 1, 64 * 50, 576, 512, kBFloat16}, {40, 60}, 2);
  check_wgmma({1, 1, 8, 1, 90, 264, 256, kFloat16}, {3}, 2);
  check_wgmma({2, 1, 33, 2, 90, 544, 8, kBFloat16, 0, false, 0.0f, true}, {3}, 2);
  Shape with_gap{2, 1, 16, 1, 150, 576, 512, kBFloat16};
  with_gap.gap = 8;
  check_wgmma(with_gap, {2}, 2);
}

void test_decode_wgmma_rows() {
  for (const int seqlen_k : {1, 63, 64, 65, 129}) {
    check_wgmma({1, 1, 17, 1, seqlen_k, 128, 128, kFloat16}, {0, 1, 3}, 2);
    check_wgmma({1, 2, 16, 4, seqlen_k, 128, 128, kBFloat16, 0, false, 0.0f, true}, {0, 2}, 2);
    check_wgmma({1, 1, 33, 1, seqlen_k, 64, 64, kFloat16}, {0, 2}, 2);
  }
  check_wgmma({2, 2, 4, 16, 700, 128, 128, kBFloat16, 0, false, 0.0f, true}, {0, 1, 5, 40}, 2);
  check_wgmma({1, 1, 8, 8, 200, 128, 128, kFloat16, 0, true, 3.0f, true}, {3}, 2);
  check_wgmma({3, 2, 4, 9, 200, 128, 128, kFloat16, 0, false, 0.0f, true}, {0, 7}, 2);
  check_wgmma({1, 1, 32, 1, 64 * 50, 128, 128, kBFloat16}, {40, 60}, 2);
  check_wgmma({1, 1, 32, 1, 64 * 9, 64, 64, kBFloat16}, {1, 4}, 2);
  // Fewer columns, of keys or of values, down to boxes outside of the tensor.
  check_wgmma({1, 1, 24, 1, 90, 8, 128, kFloat16}, {3}, 2);
  check_wgmma({2, 1, 33, 1, 90, 104, 8, kBFloat16, 0, false, 0.0f, true}, {3}, 2);
  Shape with_gap{2, 2, 20, 1, 150, 128, 96, kBFloat16};
  with_gap.gap = 8;
  check_wgmma(with_gap, {2}, 2);
}

void test_decode_wgmma_pages() {
  for (const int page_size : {16, 32, 64, 128}) {
    check_wgmma({2, 1, 16, 1, 384, 576, 512, kBFloat16, page_size, false, 0.0f, true}, {0, 3}, 2);
    check_wgmma({2, 2, 33, 1, 256, 128, 128, kFloat16, page_size, false, 0.0f, true}, {0, 3}, 2);
  }
  check_wgmma({1, 1, 32, 2, 240, 576, 512, kFloat16, 48, true, 3.0f, true}, {2}, 2);
  Shape with_gap{2, 2, 20, 1, 160, 128, 96, kBFloat16, 32};
  with_gap.gap = 8;
  check_wgmma(with_gap, {2}, 2);
}

// Which calls take the kernel on a Hopper.
void test_decode_plans_of_wgmma() {
  CHECK(!uses_wgmma({1, 2, 16, 1, 65, 128, 128, kBFloat16}), "16 rows");
  CHECK(uses_wgmma({1, 2, 17, 1, 65, 128, 128, kBFloat16}), "17 rows");
  CHECK(uses_wgmma({1, 2, 4, 16, 65, 64, 64, kFloat16}), "64 rows");
  CHECK(!uses_wgmma({1, 2, 5, 13, 65, 128, 128, kBFloat16}), "65 rows");
  CHECK(!uses_wgmma({1, 2, 20, 1, 65, 136, 128, kBFloat16}), "136 columns");
  CHECK(!uses_wgmma({1, 2, 20, 1, 65, 128, 136, kBFloat16}), "136 columns of values");
  CHECK(!uses_wgmma({1, 2, 20, 1, 0, 128, 128, kBFloat16}), "no keys");
  CHECK(!uses_wgmma({1, 2, 20, 1, 65, 128, 128, kFloat32}), "float32");
  CHECK(!uses_wgmma({1, 2, 20, 1, 65, 128, 128, kBFloat16, 0, false, 0.0f, false, kInt8}), "int8");
  CHECK(uses_wgmma({1, 2, 20, 1, 96, 128, 128, kBFloat16, 48}), "pages of 48");
  CHECK(!uses_wgmma({1, 2, 20, 1, 96, 128, 128, kBFloat16, 8}), "pages of 8");
  CHECK(!uses_wgmma({1, 2, 20, 1, 96, 128, 128, kBFloat16, 24}), "pages of 24");
  CHECK(!uses_wgmma({1, 2, 20, 1, 0, 128, 128, kBFloat16, 16}), "no pages");
  const auto with_strides = [](int64_t of_keys, int64_t of_values) {
    DecodeCase decode({2, 1, 20, 1, 65, 128, 128, kBFloat16}, 0);
    DecodeParams params = decode.params(0);
    params.k_stride[0] = of_keys;
    params.v_stride[0] = of_values;
    return cuda::plan_lean_decode(params, kHopper).uses_wgmma;
  };
  CHECK(with_strides(65 * 128, 65 * 128), "strides of tensors");
  CHECK(!with_strides(0, 65 * 128) && !with_strides(65 * 128, 0), "expanded tensors");
  CHECK(!with_strides(int64_t{1} << 39, 65 * 128), "a stride that no map can have");
}
