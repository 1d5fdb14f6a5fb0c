// SPDX-License-Identifier: BSD-3-Clause
//
// The fix-up alone: blocks store given partial states, and whoever arrives last must leave the bits
// of the host's merge. What nobody stores is NaN.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/decode/fixup.cuh"

namespace {

using namespace tree_attention;
using cuda::Float4;

constexpr int kThreads = 64, kMaxRows = 64;  // rows that the scratch memory does not hold at once

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
    cuda::complete_output<kThreads>(p.counters, states, output.workers, output.num_rows,
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
      output.o_parts.push_back(empty ? NAN : std::normal_distribution<float>()(random));
    }
  }
  output.o.assign(num_rows * head_dim, 7.0f);
  output.lse.assign(num_rows, 7.0f);
  return output;
}

bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

void check_output(Output output, int head_dim) {
  const int rows = output.num_rows;
  merge_in_canonical_order(output.workers.count, [&](int64_t i, int64_t j) {
    for (int row = 0; row < rows; ++row) {
      float& lse = output.lse_parts[i * rows + row];
      const Merge merged = merge(lse, output.lse_parts[j * rows + row]);
      lse = merged.lse;
      float* o = output.o_parts.data() + (i * rows + row) * head_dim;
      for (int d = 0; d < head_dim; ++d) o[d] = merged(o[d], o[d + (j - i) * rows * head_dim]);
    }
  });
  CHECK(same_bits(output.lse.data(), output.lse_parts.data(), rows), "lse of ",
        output.workers.count, " parts of ", rows, " rows");
  CHECK(same_bits(output.o.data(), output.o_parts.data(), rows * head_dim), "o of ",
        output.workers.count, " parts of ", rows, " rows of ", head_dim);
}

void run(std::vector<Output> outputs, int64_t num_workers, int head_dim, int seed) {
  const int64_t num_slots = num_partial_slots(num_workers);
  std::vector<uint32_t> counters(num_slots, 0);
  std::vector<float> partials(num_slots * kMaxRows * (head_dim + 1) + 4, NAN);
  float* aligned = partials.data();
  while (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) ++aligned;
  emulator::options() = {static_cast<uint64_t>(seed), 1 + seed % 5};
  cuda::launch_kernel(store_parts_and_complete, static_cast<unsigned>(num_workers), kThreads,
                      cuda::kFixupScratchBytes, cudaStream_t{},
                      Params{counters.data(), aligned, head_dim, &outputs});
  for (const Output& output : outputs) check_output(output, head_dim);
  for (const uint32_t counter : counters) CHECK(counter == 0, "a counter is ", counter);
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
  run({make_output({0, 37}, 1, 8, random)}, 37, 8, 2);
}
