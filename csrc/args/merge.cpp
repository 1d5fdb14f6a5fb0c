// SPDX-License-Identifier: BSD-3-Clause
#include "args/merge.h"

#include <c10/util/accumulate.h>

#include "args/checks.h"
#include "args/empty_tensor.h"
#include "args/memory_overlap.h"

namespace tree_attention {

namespace {

constexpr const char* kOp = "merge_states";
constexpr ArgumentChecks kCheck{kOp};

void check_parts(const at::Tensor& o_parts, const at::Tensor& lse_parts) {
  CHECK_ARG(o_parts.dim() >= 2, "o_parts must have shape [n, ..., head_dim], got ",
            o_parts.sizes());
  CHECK_ARG(o_parts.size(0) >= 1, "o_parts must hold at least one part, got ", o_parts.sizes());
  CHECK_ARG(o_parts.size(-1) >= 1, "o_parts must have a head_dim of at least 1, got ",
            o_parts.sizes());
  kCheck.shape("lse_parts", "[n, ...]", lse_parts, o_parts.sizes().slice(0, o_parts.dim() - 1));
  kCheck.dtype("lse_parts", lse_parts, at::kFloat);
  CHECK_ARG(lse_parts.device() == o_parts.device(), "lse_parts must be on o_parts' device ",
            o_parts.device(), ", got ", lse_parts.device());
}

void check_output(const at::Tensor& output, const char* name, at::IntArrayRef sizes,
                  const at::Tensor& o_parts) {
  CHECK_ARG(output.sizes() == sizes, name, " must have shape ", sizes, ", got ", output.sizes());
  CHECK_ARG(output.is_contiguous(), name, " must be contiguous, got strides ", output.strides());
  CHECK_ARG(output.device() == o_parts.device(), name, " must be on o_parts' device ",
            o_parts.device(), ", got ", output.device());
}

MergeCall prepare(const at::Tensor& o_parts, const at::Tensor& lse_parts, const at::Tensor& o,
                  const at::Tensor& lse, at::ScalarType o_dtype, const char* dtype_argument) {
  MergeCall call;
  MergeParams& params = call.params;
  params.dtype = data_type(o_parts.scalar_type(), kOp, "o_parts");
  params.out_dtype = data_type(o_dtype, kOp, dtype_argument);
  params.num_parts = o_parts.size(0);
  params.head_dim = o_parts.size(-1);
  params.num_rows = c10::multiply_integers(lse_parts.sizes().slice(1));

  // These are views where the strides allow it, as in a packed receive buffer, and copies
  // elsewhere.
  call.o_parts = o_parts.reshape({params.num_parts, params.num_rows, params.head_dim});
  if (params.head_dim > 1 && call.o_parts.stride(2) != 1) call.o_parts = call.o_parts.contiguous();
  call.lse_parts = lse_parts.reshape({params.num_parts, params.num_rows});
  call.o =
      o.defined() ? o : empty_tensor(o_parts.sizes().slice(1), o_parts.options().dtype(o_dtype));
  call.lse = lse.defined() ? lse : empty_tensor(lse_parts.sizes().slice(1), lse_parts.options());

  params.o_parts = call.o_parts.const_data_ptr();
  params.lse_parts = elements<float>(call.lse_parts);
  params.o = call.o.data_ptr();
  params.lse = call.lse.data_ptr<float>();
  for (int axis = 0; axis < 2; ++axis) {
    params.o_stride[axis] = call.o_parts.stride(axis);
    params.lse_stride[axis] = call.lse_parts.stride(axis);
  }
  return call;
}

}  // namespace

MergeCall prepare_merge(const at::Tensor& o_parts, const at::Tensor& lse_parts,
                        std::optional<at::ScalarType> out_dtype) {
  check_parts(o_parts, lse_parts);
  return prepare(o_parts, lse_parts, {}, {}, out_dtype.value_or(o_parts.scalar_type()),
                 "out_dtype");
}

MergeCall prepare_merge(const at::Tensor& o_parts, const at::Tensor& lse_parts, const at::Tensor& o,
                        const at::Tensor& lse) {
  check_parts(o_parts, lse_parts);
  check_output(o, "o", o_parts.sizes().slice(1), o_parts);
  check_output(lse, "lse", lse_parts.sizes().slice(1), o_parts);
  kCheck.dtype("lse", lse, at::kFloat);
  check_outputs(kOp, {{"o", o}, {"lse", lse}}, {{"o_parts", o_parts}, {"lse_parts", lse_parts}});
  return prepare(o_parts, lse_parts, o, lse, o.scalar_type(), "o");
}

}  // namespace tree_attention
