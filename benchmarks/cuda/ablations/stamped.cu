// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "ablations.h"
#include "stamped.cuh"

namespace tree_attention::ablations {

using namespace cuda;

cudaError_t launch_stamped(const DecodeParams& p, const Plan& plan, const Workspace& workspace,
                           cudaStream_t stream, BlockStamps* stamps) {
  StampedParams params{launch_params(p, plan, workspace), stamps,
                       (plan.shared_bytes + 15) / 16 * 16};
  const auto launch = [&]<typename Config>() {
    return launch_kernel(stamped_kernel<BFloat16, Config>, plan.num_workers * plan.cluster_size,
                         Config::kThreads, params.offset + sizeof(BlockStamps), stream, params,
                         /*early=*/false, plan.cluster_size);
  };
  const int head_dim = std::max(p.head_dim, p.head_dim_v);
  if (head_dim > 256 && plan.row_tile == 16) {
    return launch.template operator()<TileConfig<BFloat16, 576, 16>>();
  }
  if (head_dim <= 64 || head_dim > 128) return cudaErrorInvalidValue;
  if (plan.row_tile == 8) return launch.template operator()<TileConfig<BFloat16, 128, 8>>();
  if (plan.row_tile == 64) return launch.template operator()<TileConfig<BFloat16, 128, 64>>();
  return cudaErrorInvalidValue;
}

}  // namespace tree_attention::ablations
