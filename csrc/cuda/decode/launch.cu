// SPDX-License-Identifier: BSD-3-Clause
#include "launch.h"

#include <algorithm>

#include "instances.cuh"
#ifdef TREE_ATTENTION_WGMMA
#include "wgmma_launch.h"
#endif

namespace tree_attention::cuda {

cudaError_t launch_lean_decode(const DecodeParams& p, const Plan& plan, const Workspace& workspace,
                               cudaStream_t stream) {
  if (p.batch == 0 || p.num_heads_q == 0 || p.seqlen_q == 0) return cudaSuccess;
#ifdef TREE_ATTENTION_WGMMA
  if (plan.uses_wgmma) return launch_lean_decode_wgmma(p, plan, workspace, stream);
#endif
  const LaunchParams params = launch_params(p, plan, workspace);
  return with_instance(p.dtype, p.kv_dtype, std::max(p.head_dim, p.head_dim_v),
                       [&]<typename Element, int kHeadDim, typename Cached>() {
                         return launch_instance<Element, kHeadDim, Cached>(params, plan, stream);
                       });
}

cudaError_t find_resident_blocks(const DecodeParams& p, const Plan& plan, int* blocks) {
#ifdef TREE_ATTENTION_WGMMA
  if (plan.uses_wgmma) return find_resident_blocks_wgmma(p, plan, blocks);
#endif
  return with_instance(p.dtype, p.kv_dtype, std::max(p.head_dim, p.head_dim_v),
                       [&]<typename Element, int kHeadDim, typename Cached>() {
                         return find_resident_blocks_of_instance<Element, kHeadDim, Cached>(plan,
                                                                                            blocks);
                       });
}

}  // namespace tree_attention::cuda
