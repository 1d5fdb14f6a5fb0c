// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime_api.h>

#include "common/merge_params.h"

namespace tree_attention::cuda {

cudaError_t launch_merge_states(const MergeParams& params, cudaStream_t stream);

}  // namespace tree_attention::cuda
