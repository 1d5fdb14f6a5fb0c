// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime_api.h>

#include "common/range_params.h"

namespace tree_attention::cuda {

cudaError_t launch_split_ranges(const RangeParams& params, cudaStream_t stream);

}  // namespace tree_attention::cuda
