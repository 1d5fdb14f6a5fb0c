// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "common/partition.h"

using tree_attention::Contributors;
using tree_attention::Partition;

namespace {

constexpr int64_t kMaxTiles = 48, kMaxWorkers = 40;

}  // namespace

// Every line of up to kMaxTiles tiles over up to kMaxWorkers workers.
void test_partition() {
  for (int64_t tiles = 0; tiles <= kMaxTiles; ++tiles) {
    for (int64_t workers = 1; workers <= kMaxWorkers; ++workers) {
      const Partition partition{tiles, workers};
      CHECK(partition.begin(0) == 0, tiles, " ", workers);
      CHECK(partition.begin(workers) == tiles, tiles, " ", workers);
      for (int64_t worker = 0; worker < workers; ++worker) {
        const int64_t begin = partition.begin(worker), end = partition.begin(worker + 1);
        CHECK(tiles / workers <= end - begin && end - begin <= (tiles + workers - 1) / workers,
              tiles, " tiles, ", workers, " workers, worker ", worker);
        for (int64_t tile = begin; tile < end; ++tile) {
          CHECK(partition.owner(tile) == worker, tiles, " tiles, ", workers, " workers, tile ",
                tile);
        }
      }
    }
  }
  // Far out, products stay below 2^63: a million workers on 2^40 tiles.
  const Partition large{int64_t{1} << 40, 1'000'003};
  for (int64_t worker = 0; worker < large.num_workers; worker += 999) {
    CHECK(large.owner(large.begin(worker)) == worker, worker);
    CHECK(large.owner(large.begin(worker + 1) - 1) == worker, worker);
  }
}

void test_contributors() {
  for (int64_t first = 0; first <= 6; ++first) {
    for (int64_t second = 0; second <= 6; ++second) {
      for (int64_t third = 0; third <= 6; ++third) {
        const std::vector<int64_t> offsets{0, first, first + second, first + second + third};
        const int64_t tiles = offsets.back();
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t output = tree_attention::find_output(offsets.data(), 3, tile);
          CHECK(offsets[output] <= tile && tile < offsets[output + 1], "tile ", tile);
        }
        for (int64_t workers = 1; workers <= tiles; ++workers) {
          const Partition partition{tiles, workers};
          for (int64_t output = 0; output < 3; ++output) {
            if (offsets[output] == offsets[output + 1]) continue;
            const Contributors found =
                tree_attention::contributors(partition, offsets[output], offsets[output + 1]);
            for (int64_t worker = 0; worker < workers; ++worker) {
              const bool works = std::max(partition.begin(worker), offsets[output]) <
                                 std::min(partition.begin(worker + 1), offsets[output + 1]);
              const bool listed = found.first <= worker && worker < found.first + found.count;
              CHECK(works == listed, "worker ", worker, " of ", workers, ", output ", output);
            }
          }
        }
      }
    }
  }
}

// Random lines with overhead, workers walking them as a kernel does.
void test_line_with_overhead() {
  std::mt19937 random(0);
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const int64_t overhead = repeat % 3, max_tiles = repeat % 5 == 0 ? 2 : 30;
    std::vector<int64_t> tiles(1 + random() % 12), offsets{0};
    for (int64_t& count : tiles) {
      count = random() % 3 == 0 ? 0 : random() % (max_tiles + 1);
      offsets.push_back(offsets.back() + overhead + count);
    }
    const int64_t max_workers = 1 + random() % 64;
    const auto partition = Partition::over(offsets.back(), max_workers);
    CHECK(1 <= partition.num_workers && partition.num_workers <= max_workers, max_workers);

    std::vector<int64_t> tiles_done(tiles.size(), 0);
    std::vector<int> times_empty(tiles.size(), 0);
    for (int64_t worker = 0; worker < partition.num_workers; ++worker) {
      const int64_t begin = partition.begin(worker), end = partition.begin(worker + 1);
      CHECK(begin < end || partition.num_tiles == 0, "worker ", worker, " has no work");
      for (size_t output = 0; output < tiles.size(); ++output) {
        const auto tiles_below = [&](int64_t position) {
          return tree_attention::tiles_below(position, offsets[output], overhead, tiles[output]);
        };
        const int64_t first = tiles_below(begin), last = tiles_below(end);
        if (tiles[output] == 0) {
          times_empty[output] += begin <= offsets[output] && offsets[output] < end;
          CHECK(first == last, "output ", output, " has no tiles");
          continue;
        }
        const int64_t tiles_begin = offsets[output] + overhead;
        const Contributors workers =
            tree_attention::contributors(partition, tiles_begin, tiles_begin + tiles[output]);
        const bool listed = workers.first <= worker && worker < workers.first + workers.count;
        CHECK(listed == (first < last), "worker ", worker, ", output ", output);
        if (first == last) continue;
        CHECK(first == tiles_done[output], "tiles in order, output ", output);
        tiles_done[output] = last;
      }
    }
    CHECK(tiles_done == tiles, "repeat ", repeat);
    for (size_t output = 0; output < tiles.size(); ++output) {
      CHECK(overhead == 0 || times_empty[output] == (tiles[output] == 0), "output ", output);
    }
  }
}
