// SPDX-License-Identifier: BSD-3-Clause
//
// The split_ranges kernel against what common/range_params.h promises. Buffers have the exact size,
// so that a sanitizer sees the first element beyond.
#include <algorithm>
#include <climits>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/ranges/split_ranges.cuh"
#include "machine.h"

namespace {

using namespace tree_attention;

constexpr int kKeys = 12;  // ranges lie in [-1, kKeys], so that many overlap, meet and are equal
constexpr int32_t kUnwritten = INT_MIN;
constexpr uint16_t kGap = 0xfffe, kUnwrittenElement = 0xffff;

struct Range {
  int32_t begin, end;

  bool operator==(const Range&) const = default;
  bool has(int32_t key) const { return begin <= key && key < end; }
};

struct Sizes {
  int64_t batch, seqlen_q;
  int32_t num_ranges;
};

// Key ranges that lie as [range, token, batch, 2] in memory, with a gap behind each token.
class Ranges {
 public:
  Ranges(const Sizes& sizes, RangeParams& p, std::mt19937& random) {
    p.ranges_stride[0] = 2;
    p.ranges_stride[1] = 2 * sizes.batch + 2;
    p.ranges_stride[2] = p.ranges_stride[1] * sizes.seqlen_q;
    values_.resize(p.ranges_stride[2] * sizes.num_ranges - 2, kKeys);
    for (int32_t& value : values_) value = static_cast<int32_t>(random() % (kKeys + 2)) - 1;
    p.ranges = values_.data();
  }

  static Range of(const RangeParams& p, int64_t batch, int64_t token, int64_t range) {
    const int32_t* values = p.ranges + batch * p.ranges_stride[0] + token * p.ranges_stride[1] +
                            range * p.ranges_stride[2];
    return {values[0], values[1]};
  }

 private:
  std::vector<int32_t> values_;
};

void check_query(const RangeParams& p, int64_t batch, int64_t token) {
  std::vector<Range> ranges, parts;
  for (int64_t i = 0; i < p.num_ranges; ++i) {
    ranges.push_back(Ranges::of(p, batch, token, i));
    const int32_t* part = p.parts + ((i * p.batch + batch) * p.seqlen_q + token) * 2;
    parts.push_back({part[0], part[1]});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  for (size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].end == ranges[i].end, "part ", i, " ends with ", parts[i].end);
    for (size_t before = 0; before < i; ++before) {
      CHECK(parts[before].end <= parts[i].begin, "part ", i, " begins with ", parts[i].begin);
    }
  }
  for (int32_t key = -2; key <= kKeys + 1; ++key) {
    const auto has_key = [&](const Range& range) { return range.has(key); };
    const int64_t count = std::count_if(parts.begin(), parts.end(), has_key);
    const bool is_seen = std::any_of(ranges.begin(), ranges.end(), has_key);
    CHECK(count == is_seen, "key ", key, " is in ", count, " parts of query ", token,
          " of sequence ", batch);
  }
}

// A tensor with gaps, and room for its copies.
class Repeated {
 public:
  Repeated(const Sizes& sizes, int64_t first, int64_t second, int64_t row_size, int64_t gap,
           RepeatedTensor& x) {
    x.num_rows[0] = first;
    x.num_rows[1] = second;
    x.row_size = row_size;
    // The second axis of rows is the outer one in memory.
    x.stride[1] = row_size + gap;
    x.stride[2] = x.stride[1] * first;
    x.stride[0] = x.stride[2] * second;
    from_.resize(x.stride[0] * sizes.batch - gap, kGap);
    to_.resize(x.size_of_sequence() * sizes.batch * sizes.num_ranges, kUnwrittenElement);
    for (size_t i = 0; i < from_.size(); ++i) {
      if (static_cast<int64_t>(i) % x.stride[1] < row_size) from_[i] = i % 0xfff1;
    }
    x.from = from_.data();
    x.to = to_.data();
  }

  void check(const RangeParams& p, const RepeatedTensor& x) const {
    const uint16_t* found = to_.data();
    for (int64_t range = 0; range < p.num_ranges; ++range) {
      for (int64_t batch = 0; batch < p.batch; ++batch) {
        for (int64_t first = 0; first < x.num_rows[0]; ++first) {
          for (int64_t second = 0; second < x.num_rows[1]; ++second) {
            const uint16_t* row =
                x.from + batch * x.stride[0] + first * x.stride[1] + second * x.stride[2];
            CHECK(std::equal(row, row + x.row_size, found), "row ", first, ", ", second,
                  " of sequence ", batch, " of range ", range);
            found += x.row_size;
          }
        }
      }
    }
    CHECK(found == to_.data() + to_.size(), "copies");
  }

 private:
  std::vector<uint16_t> from_, to_;
};

void check(const Sizes& sizes, bool has_sequences, int num_repeated, std::mt19937& random) {
  RangeParams p{};
  p.batch = sizes.batch;
  p.seqlen_q = sizes.seqlen_q;
  p.num_ranges = sizes.num_ranges;
  const Ranges ranges(sizes, p, random);
  std::vector<int32_t> parts(2 * sizes.num_ranges * sizes.batch * sizes.seqlen_q, kUnwritten);
  std::vector<int32_t> sequences(has_sequences ? sizes.num_ranges * sizes.batch : 0, kUnwritten);
  p.parts = parts.data();
  p.sequences = has_sequences ? sequences.data() : nullptr;
  // As queries, positions and a page table are.
  const int64_t shapes[3][4] = {
      {3, sizes.seqlen_q, 8, 8}, {1, sizes.seqlen_q, 4, 0}, {1, 1, 10, 2}};
  std::vector<Repeated> repeated;
  for (int i = 0; i < num_repeated; ++i) {
    const auto& [first, second, row_size, gap] = shapes[i];
    repeated.emplace_back(sizes, first, second, row_size, gap, p.repeated[i]);
  }
  p.num_repeated = num_repeated;
  CHECK(cuda::launch_split_ranges(p, nullptr) == cudaSuccess, "the launch failed");

  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    for (int64_t token = 0; token < sizes.seqlen_q; ++token) check_query(p, batch, token);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    CHECK(sequences[i] == static_cast<int64_t>(i) % sizes.batch, "sequence ", i, " is ",
          sequences[i]);
  }
  for (int i = 0; i < num_repeated; ++i) repeated[i].check(p, p.repeated[i]);
}

}  // namespace

void test_split_ranges() {
  std::mt19937 random(0);
  uint64_t seed = 0;
  for (const Sizes& sizes : {Sizes{1, 1, 2}, Sizes{1, 2, 3}, Sizes{3, 2, 3}, Sizes{2, 5, 7},
                             Sizes{2, 1, 64}}) {  // 128 threads for the ranges
    for (const bool has_sequences : {false, true}) {
      for (int num_repeated = 0; num_repeated <= 3; ++num_repeated, ++seed) {
        emulator::options() = {seed, 1 + static_cast<int>(seed % 3)};
        check(sizes, has_sequences, num_repeated, random);
      }
    }
  }
  emulator::counters() = {};
  check({0, 3, 2}, true, 0, random);
  CHECK(emulator::counters().launches == 0, "nothing was launched");
}
