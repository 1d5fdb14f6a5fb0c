// SPDX-License-Identifier: BSD-3-Clause
//
// Where the state of an output goes. A sink has store(row, column, o) for four neighbours of o and
// store_lse(row, lse), rows counted within the output.
#pragma once

#include "../common/rows.h"
#include "element.cuh"

namespace tree_attention::cuda {

// The caller's tensors: o in its dtype and strides.
class OutputSink {
 public:
  __device__ OutputSink(const DecodeParams& params, const Rows& rows) : p_(params), rows_(rows) {}

  __device__ void store(int row, int column, const Float4& o) const {
    const auto [token, head] = place(row);
    const int64_t offset =
        rows_.batch * p_.o_stride[0] + head * p_.o_stride[1] + token * p_.o_stride[2] + column;
    switch (p_.out_dtype) {
      case DataType::kFloat32:
        return store_four(static_cast<float*>(p_.o) + offset, o);
      case DataType::kBFloat16:
        return store_four(static_cast<BFloat16*>(p_.o) + offset, o);
      case DataType::kFloat16:
        return store_four(static_cast<Float16*>(p_.o) + offset, o);
    }
  }

  __device__ void store_lse(int row, float lse) const {
    const auto [token, head] = place(row);
    p_.lse[rows_.batch * p_.lse_stride[0] + head * p_.lse_stride[1] + token * p_.lse_stride[2]] =
        lse;
  }

 private:
  struct Place {
    int token;
    int64_t head;
  };

  __device__ Place place(int row) const {
    const int packed = static_cast<int>(rows_.begin) + row;
    return {packed / p_.group_size(), rows_.head_kv * p_.group_size() + packed % p_.group_size()};
  }

  template <typename T>
  static __device__ void store_four(T* o, const Float4& values) {
    // One by one: nothing is promised about the alignment of o.
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = from_float<T>(values.value[i]);
  }

  const DecodeParams& p_;
  const Rows& rows_;
};

}  // namespace tree_attention::cuda
