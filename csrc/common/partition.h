// SPDX-License-Identifier: BSD-3-Clause
//
// The lean (stream-K) partition. Work is a line of tiles: for each output its tiles in order, all
// outputs end to end. Workers take equal contiguous ranges of the line; a range may cross outputs.
// LeanAttention's printed Algorithm 4 loses `num_tiles % num_workers` tiles and finds the last
// contributor of an output wrongly; the formulas below are exact for every size, also for more
// workers than tiles.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace tree_attention {

struct Partition {
  int64_t num_tiles;    // of the whole line
  int64_t num_workers;  // >= 1

  // Never more workers than tiles: then each has work, and those that share an output are
  // consecutive.
  static TREE_ATTENTION_HOST_DEVICE Partition over(int64_t num_tiles, int64_t max_workers) {
    const int64_t num_workers = max_workers < num_tiles ? max_workers : num_tiles;
    return {num_tiles, num_workers < 1 ? 1 : num_workers};
  }

  // First tile of `worker`; begin(num_workers) == num_tiles. Loads differ by at most one tile.
  TREE_ATTENTION_HOST_DEVICE int64_t begin(int64_t worker) const {
    return worker * num_tiles / num_workers;
  }

  // The worker that runs `tile`: the only w with begin(w) <= tile < begin(w + 1).
  TREE_ATTENTION_HOST_DEVICE int64_t owner(int64_t tile) const {
    return ((tile + 1) * num_workers - 1) / num_tiles;
  }
};

// The consecutive workers that run the tiles [tile_begin, tile_end) of an output.
struct Contributors {
  int64_t first;  // worker
  int64_t count;
};

TREE_ATTENTION_HOST_DEVICE Contributors contributors(const Partition& partition, int64_t tile_begin,
                                                     int64_t tile_end) {
  const int64_t first = partition.owner(tile_begin);
  return {first, partition.owner(tile_end - 1) - first + 1};
}

// The number of an output's tiles that lie below `position` on a line with overhead. An output
// costs more than its tiles, since its queries are loaded and its state is stored; so on such a
// line it is `overhead` positions followed by its tiles, and the line is cut by positions. A worker
// of positions [begin, end) runs the tiles from tiles_below(begin) up to tiles_below(end), maybe
// none. An output without tiles belongs to the worker of its first position.
template <typename Index>
TREE_ATTENTION_HOST_DEVICE Index tiles_below(Index position, Index output_begin, Index overhead,
                                             Index num_tiles) {
  const Index tiles = position - output_begin - overhead;
  return tiles < 0 ? 0 : tiles < num_tiles ? tiles : num_tiles;
}

// Index of the output that holds `tile`: the last i with tile_offsets[i] <= tile, where
// tile_offsets [num_outputs + 1] is the exclusive prefix sum of the outputs' tile counts. Outputs
// without tiles are never returned.
TREE_ATTENTION_HOST_DEVICE int64_t find_output(const int64_t* tile_offsets, int64_t num_outputs,
                                               int64_t tile) {
  int64_t low = 0, high = num_outputs;  // tile_offsets[low] <= tile < tile_offsets[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (tile_offsets[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace tree_attention
