// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/decode/lean_decode.cuh"

namespace tree_attention::cuda {
template cudaError_t launch_instance<BFloat16, 256, Float8>(const LaunchParams&, const Plan&,
                                                            cudaStream_t);
}
