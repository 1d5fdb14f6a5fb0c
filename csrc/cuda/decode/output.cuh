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
    with_dtype(p.out_dtype,
               [&]<typename Out>() { store_four(static_cast<Out*>(p.o) + offset, o); });
  }

  __device__ void store_lse(int row, float lse) const {
    const DecodeParams& p = params_.decode;
    const auto [token, head] = place_of_row(params_, rows_, row);
    p.lse[rows_.batch * p.lse_stride[0] + head * p.lse_stride[1] + token * p.lse_stride[2]] = lse;
  }

 private:
  template <typename T>
  static __device__ void store_four(T* o, const Float4& values) {
    // They are stored one by one, because nothing is promised about the alignment of o.
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = from_float<T>(values.value[i]);
  }

  const LaunchParams& params_;
  const OutputRows& rows_;
};

}  // namespace tree_attention::cuda
