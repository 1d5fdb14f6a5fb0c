// SPDX-License-Identifier: BSD-3-Clause
#include "wgmma_launch.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "wgmma_config.cuh"

namespace tree_attention::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function; nothing here is linked with the driver. It is asked for until it is found.
cudaError_t find_encode(Encode& encode) {
  static std::atomic<void*> found = nullptr;
  void* function = found;
  if (function == nullptr) {
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    found = function;
  }
  encode = reinterpret_cast<Encode>(function);
  return cudaSuccess;
}

// The map of keys or values as [batch or page, head, key or slot, column], in boxes of a run of
// keys (TileRuns) and 64 columns. What lies beyond it is read as zero.
cudaError_t make_map(CUtensorMap& map, const DecodeParams& p, const void* data, int head_dim,
                     const int64_t (&in_elements)[3]) {
  constexpr int kRank = 4;
  const auto [outer, heads, keys] = sizes_of_keys(p);
  const cuuint64_t sizes[kRank] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(keys),
                                   static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(outer)};
  cuuint64_t strides[kRank - 1];
  cuuint64_t inner = head_dim * element_size(p.kv_dtype);  // bytes of what an axis has many of
  for (int axis = 0; axis < kRank - 1; ++axis) {
    // An axis of one element may have any stride in a tensor, and in a map none that is smaller.
    const int64_t bytes = in_elements[2 - axis] * element_size(p.kv_dtype);
    strides[axis] = sizes[axis + 1] > 1 ? static_cast<cuuint64_t>(bytes) : inner;
    inner = strides[axis] * sizes[axis + 1];
  }
  const int run = p.page_table == nullptr ? kWgmmaTileKeys : keys_of_wgmma_run(p.page_size);
  const cuuint32_t box[kRank] = {kWgmmaBoxColumns, static_cast<cuuint32_t>(run), 1, 1};
  const cuuint32_t element_strides[kRank] = {1, 1, 1, 1};
  Encode encode;
  const cudaError_t error = find_encode(encode);
  if (error != cudaSuccess) return error;
  const CUresult result =
      encode(&map,
             p.kv_dtype == DataType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kRank, const_cast<void*>(data), sizes, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_lean_decode_wgmma(const DecodeParams& p, const Plan& plan,
                                     const Workspace& workspace, cudaStream_t stream) {
  WgmmaParams params;
  params.launch = launch_params(p, plan, workspace);
  cudaError_t error = make_map(params.keys, p, p.k, p.head_dim, p.k_stride);
  if (error == cudaSuccess && p.head_dim <= 256) {
    error = make_map(params.values, p, p.v, p.head_dim_v, p.v_stride);
  }
  if (error != cudaSuccess) return error;
  return with_wgmma_instance(p, [&]<typename Element, int kHeadDim>() {
    return launch_wgmma_instance<Element, kHeadDim>(params, plan, stream);
  });
}

cudaError_t find_resident_blocks_wgmma(const DecodeParams& p, const Plan& plan, int* blocks) {
  return with_wgmma_instance(p, [&]<typename Element, int kHeadDim>() {
    return find_resident_blocks_of_wgmma_instance<Element, kHeadDim>(plan, blocks);
  });
}

}  // namespace tree_attention::cuda
