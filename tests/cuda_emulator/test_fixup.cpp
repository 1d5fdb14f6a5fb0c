// SPDX-License-Identifier: BSD-3-Clause
//
// The fix-up alone: blocks store given partial states, and whoever arrives last must leave their
// merge, in bits that do not depend on who that is. What nobody stores is NaN.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/decode/fixup.cuh"
#include "cuda/decode/schedule.cuh"

namespace {

using namespace tree_attention;
using cuda::Float4;

constexpr int kThreads = 64, kMaxRows = 128;  // rows that the scratch memory does not hold at once

struct OutputSink {
  float *o, *lse;
  int head_dim;

  void store(int row, int column, const Float4& values) const {
    std::copy_n(values.value, 4, o + row * head_dim + column);
  }
  void store_lse(int row, float value) const { lse[row] = value; }
};

struct Output {
  Contributors workers;
  int num_rows;
  std::vector<float> o_parts, lse_parts;  // [contributors, rows, head_dim], [contributors, rows]
  std::vector<float> o, lse;
};

struct Params {
  uint32_t* counters;
  float* partials;
  int head_dim;
  std::vector<Output>* outputs;  // in the order of the line
};

void store_parts_and_complete(Params p) {
  const cuda::PartialStates states(p.partials, kMaxRows, p.head_dim);
  for (Output& output : *p.outputs) {
    const int64_t part = blockIdx.x - output.workers.first;
    if (part < 0 || part >= output.workers.count) continue;
    const auto sink = states.sink(partial_slot(output.workers, part));
    const int columns = p.head_dim / 4;
    for (int i = threadIdx.x; i < output.num_rows * columns; i += kThreads) {
      const int row = i / columns, column = i % columns * 4;
      const int64_t row_of_parts = part * output.num_rows + row;
      Float4 o;
      std::copy_n(output.o_parts.data() + row_of_parts * p.head_dim + column, 4, o.value);
      sink.store(row, column, o);
      if (column == 0) sink.store_lse(row, output.lse_parts[row_of_parts]);
    }
    const OutputSink result{output.o.data(), output.lse.data(), p.head_dim};
    cuda::complete_output<kThreads>(p.counters, states, output.workers, part, output.num_rows,
                                    cuda::dynamic_shared_memory(), result);
  }
}

Output make_output(const Contributors& workers, int num_rows, int head_dim, std::mt19937& random) {
  Output output{workers, num_rows, {}, {}, {}, {}};
  for (int64_t i = 0; i < workers.count * num_rows; ++i) {
    const bool empty = random() % 3 == 0;
    const float nan = random() % 50 == 0 ? NAN : std::normal_distribution<float>(0, 5)(random);
    output.lse_parts.push_back(empty ? -INFINITY : nan);
    for (int d = 0; d < head_dim; ++d) {
      output.o_parts.push_back(empty ? 0.0f : std::normal_distribution<float>()(random));
    }
  }
  output.o.assign(num_rows * head_dim, 7.0f);
  output.lse.assign(num_rows, 7.0f);
  return output;
}

// The same in float64. Parts of lse NaN make all of a row NaN.
void check_output(const Output& output, int head_dim) {
  const int64_t count = output.workers.count, rows = output.num_rows;
  for (int64_t row = 0; row < rows; ++row) {
    const auto lse_of = [&](int64_t part) { return double{output.lse_parts[part * rows + row]}; };
    double largest = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < count; ++i) largest = std::fmax(largest, lse_of(i));
    const double base = largest == -INFINITY ? 0.0 : largest;
    for (int64_t i = 0; i < count; ++i) sum += std::exp(lse_of(i) - base);
    const auto check = [&](double found, double expected, const char* what) {
      const bool right =
          std::isnan(expected)
              ? std::isnan(found)
              : found == expected || std::abs(found - expected) <= 2e-6 * (1 + std::abs(expected));
      CHECK(right, what, " of ", count, " parts of ", rows, " rows of ", head_dim, " is ", found,
            " and not ", expected);
    };
    check(output.lse[row], sum == 0.0 ? -INFINITY : base + std::log(sum), "lse");
    for (int d = 0; d < head_dim; ++d) {
      double o = 0.0;
      for (int64_t i = 0; i < count && sum != 0.0; ++i) {
        o += std::exp(lse_of(i) - base) / sum * output.o_parts[(i * rows + row) * head_dim + d];
      }
      check(output.o[row * head_dim + d], o, "o");
    }
  }
}

void run(std::vector<Output> outputs, int64_t num_workers, int head_dim, int seed) {
  const int64_t num_slots = num_partial_slots(num_workers);
  std::vector<std::vector<float>> bits;
  for (int turn = 0; turn < 2; ++turn) {  // blocks arrive in other orders
    std::vector<uint32_t> counters(num_slots, 0);
    std::vector<float> partials(num_slots * kMaxRows * (head_dim + 1) + 4, NAN);
    float* aligned = partials.data();
    while (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) ++aligned;
    emulator::options() = {static_cast<uint64_t>(seed + 1000 * turn), 1 + (seed + turn) % 5};
    cuda::launch_kernel(store_parts_and_complete, static_cast<unsigned>(num_workers), kThreads,
                        cuda::kFixupScratchBytes, cudaStream_t{},
                        Params{counters.data(), aligned, head_dim, &outputs});
    for (const uint32_t counter : counters) CHECK(counter == 0, "a counter is ", counter);
    std::vector<float> all;
    for (const Output& output : outputs) {
      all.insert(all.end(), output.o.begin(), output.o.end());
      all.insert(all.end(), output.lse.begin(), output.lse.end());
    }
    bits.push_back(all);
  }
  CHECK(std::memcmp(bits[0].data(), bits[1].data(), bits[0].size() * sizeof(float)) == 0,
        "bits depend on who arrives last");
  for (const Output& output : outputs) check_output(output, head_dim);
}

}  // namespace

// Of one output: flat to three levels.
void test_fixup_levels() {
  std::mt19937 random(0);
  std::vector<int> counts{255, 577, 600};
  for (int count = 2; count <= 70; ++count) counts.push_back(count);
  const int head_dims[] = {8, 64, 24};
  for (int count : counts) {
    const int num_rows = count % 7 == 1 ? kMaxRows : 1 + count % 5, head_dim = head_dims[count % 3];
    run({make_output({0, count}, num_rows, head_dim, random)}, count, head_dim, count);
  }
}

// Of random lines, with blocks that have several outputs.
void test_fixup_lines() {
  std::mt19937 random(1);
  for (int seed = 0; seed < 100; ++seed) {
    const int64_t overhead = seed % 3;
    std::vector<int64_t> offsets{0};
    for (int i = random() % 8; i >= 0; --i) {
      offsets.push_back(offsets.back() + overhead + 1 + random() % 30);
    }
    const Partition partition = Partition::over(offsets.back(), 2 + random() % 50);
    std::vector<Output> outputs;
    for (size_t i = 0; i + 1 < offsets.size(); ++i) {
      const auto workers = contributors(partition, offsets[i] + overhead, offsets[i + 1]);
      if (workers.count > 1) outputs.push_back(make_output(workers, 1 + random() % 4, 16, random));
    }
    run(outputs, partition.num_workers, 16, seed);
  }
}

// For ThreadSanitizer, whose fibers take a millisecond each.
void test_fixup_short() {
  std::mt19937 random(2);
  run({make_output({0, 4}, 3, 8, random), make_output({3, 2}, 1, 8, random)}, 5, 8, 0);
  run({make_output({0, 36}, kMaxRows, 8, random)}, 36, 8, 1);
  run({make_output({0, 36}, 5, 8, random)}, 36, 8, 2);
  run({make_output({0, 37}, 1, 8, random)}, 37, 8, 3);
}

// The kernel's way to Partition::owner, which takes no division, of lines up to any length.
void test_owners() {
  std::mt19937_64 random(3);
  for (int i = 0; i < 300'000; ++i) {
    const int64_t num_tiles = 1 + static_cast<int64_t>(random() >> (20 + random() % 43));
    const int64_t most = std::min<int64_t>(num_tiles, 1 << 14);
    const Partition partition{num_tiles,
                              i % 3 == 0 ? most : 1 + static_cast<int64_t>(random() % most)};
    const int64_t worker = random() % partition.num_workers;
    for (const int64_t tile : {static_cast<int64_t>(random() % num_tiles), partition.begin(worker),
                               partition.begin(worker + 1) - 1, int64_t{0}, num_tiles - 1}) {
      CHECK(cuda::owner_of(partition, tile) == partition.owner(tile), "tile ", tile, " of ",
            num_tiles, " among ", partition.num_workers);
    }
  }
}
