// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime_api.h>

#include "common/append_params.h"

namespace tree_attention::cuda {

// Slots out of range are left out, as -1 is: the host does not see them. Warps of tokens with the
// same slot write to its row in any order, element by element.
cudaError_t launch_append_kv(const AppendParams& params, cudaStream_t stream);

}  // namespace tree_attention::cuda
