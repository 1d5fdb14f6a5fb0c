// SPDX-License-Identifier: BSD-3-Clause
//
// Where the state of an output goes. A sink has store(row, column, o), for four neighbouring
// columns of o, and store_lse(row, lse). Rows are counted within the output.
#pragma once

#include "cuda/element.cuh"
#include "units.cuh"

namespace tree_attention::cuda {

// Stores into the caller's tensors, with their strides and the dtype of o.
class OutputSink {
 public:
  __device__ OutputSink(const LaunchParams& params, const OutputRows& rows)
      : params_(params), rows_(rows) {}

  __device__ void store(int row, int column, const Float4& o) const {
    const DecodeParams& p = params_.decode;
    const auto [token, head] = place_of_row(params_, rows_, row);
    const int64_t offset =
        rows_.batch * p.o_stride[0] + head * p.o_stride[1] + token * p.o_stride[2] + column;
    char* const place = static_cast<char*>(p.o) + offset * element_size(p.out_dtype);
    if (p.out_dtype == DataType::kFloat32) {
      store_floats(reinterpret_cast<float*>(place), o);
    } else {
      store_halves(reinterpret_cast<uint16_t*>(place), o, p.out_dtype == DataType::kBFloat16);
    }
  }

  __device__ void store_lse(int row, float lse) const {
    const DecodeParams& p = params_.decode;
    const auto [token, head] = place_of_row(params_, rows_, row);
    p.lse[rows_.batch * p.lse_stride[0] + head * p.lse_stride[1] + token * p.lse_stride[2]] = lse;
  }

 private:
  // Nothing is promised about the alignment of o: elements are stored one by one where four do not
  // lie in an aligned place.
  static __device__ void store_floats(float* o, const Float4& values) {
    if (reinterpret_cast<uintptr_t>(o) % sizeof(Float4) == 0) return store_global_float4(o, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = values.value[i];
  }

  static __device__ void store_halves(uint16_t* o, const Float4& values, bool is_bfloat16) {
    uint32_t pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = values.value[2 * i], high = values.value[2 * i + 1];
      pairs[i] = is_bfloat16 ? cvt_bf16x2(low, high) : cvt_f16x2(low, high);
    }
    if (reinterpret_cast<uintptr_t>(o) % sizeof(pairs) == 0) {
      return st_global_v2(reinterpret_cast<uint32_t*>(o), pairs);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2));
  }

  const LaunchParams& params_;
  const OutputRows& rows_;
};

}  // namespace tree_attention::cuda
