// SPDX-License-Identifier: BSD-3-Clause
#include "schedule.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "args/checks.h"
#include "args/empty_tensor.h"
#include "common/partition.h"

namespace tree_attention {

at::Tensor lean_schedule(const at::Tensor& num_tiles, int64_t num_workers) {
  constexpr const char* kOp = "lean_schedule";
  CHECK_ARG(num_tiles.dim() == 1, "num_tiles must have shape [outputs], got ", num_tiles.sizes());
  ArgumentChecks{kOp}.dtype("num_tiles", num_tiles, at::kInt);
  CHECK_ARG(num_workers >= 1, "num_workers must be at least 1, got ", num_workers);

  const at::Tensor tiles = num_tiles.contiguous();
  const int64_t num_outputs = tiles.numel();
  std::vector<int64_t> tile_offsets(num_outputs + 1, 0);
  for (int64_t output = 0; output < num_outputs; ++output) {
    const int64_t count = elements<int32_t>(tiles)[output];
    CHECK_ARG(count >= 0, "num_tiles must not be negative, got ", count, " for output ", output);
    tile_offsets[output + 1] = tile_offsets[output] + count;
  }

  const Partition partition{tile_offsets.back(), num_workers};
  CHECK_ARG(partition.num_tiles <= std::numeric_limits<int64_t>::max() / num_workers,
            "num_workers times the sum of num_tiles must be below 2^63, got ", num_workers, " and ",
            partition.num_tiles);
  std::vector<std::array<int64_t, 4>> segments;
  for (int64_t tile = 0, end; tile < partition.num_tiles; tile = end) {
    const int64_t worker = partition.owner(tile);
    const int64_t output = find_output(tile_offsets.data(), num_outputs, tile);
    end = std::min(partition.begin(worker + 1), tile_offsets[output + 1]);
    segments.push_back({worker, output, tile - tile_offsets[output], end - tile_offsets[output]});
  }
  at::Tensor table = empty_tensor({static_cast<int64_t>(segments.size()), 4},
                                  num_tiles.options().dtype(at::kLong));
  if (!segments.empty()) {
    std::copy_n(segments.front().data(), table.numel(), table.data_ptr<int64_t>());
  }
  return table;
}

}  // namespace tree_attention
