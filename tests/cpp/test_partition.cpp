// SPDX-License-Identifier: BSD-3-Clause
//
// Every line of up to kMaxTiles tiles over up to kMaxWorkers workers.
#include <algorithm>
#include <vector>

#include "check.h"
#include "common/partition.h"

using tree_attention::Contributors;
using tree_attention::Partition;

namespace {

constexpr int64_t kMaxTiles = 48, kMaxWorkers = 40;

}  // namespace

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
