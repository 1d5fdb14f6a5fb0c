// SPDX-License-Identifier: BSD-3-Clause
#include "one_shot_args.h"

#include "args/checks.h"

namespace tree_attention::cuda {
namespace {

constexpr const char* kOp = "one_shot";
static_assert(sizeof(OneShotControl) == 4 * sizeof(int32_t));
static_assert(sizeof(OneShotHost) == (2 + kOneShotMaxRanks) * sizeof(int64_t));

void check(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes,
           at::Device device) {
  CHECK_ARG(tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.is_contiguous() &&
                tensor.device() == device,
            name, " must be a contiguous ", dtype_name(dtype), " ", sizes, " on ", device, ", got ",
            dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " on ", tensor.device());
}

void check_alignment(const at::Tensor& tensor, const char* name) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  CHECK_ARG(address % kOneShotAlignment == 0, name, " must begin at a multiple of ",
            kOneShotAlignment, " bytes, got one ", address % kOneShotAlignment, " bytes beyond");
}

}  // namespace

OneShotParams prepare_one_shot(const at::Tensor& o, const at::Tensor& lse,
                               const at::Tensor& buffers, const at::Tensor& control,
                               const at::Tensor& host, int64_t rank, int64_t slot_bytes,
                               const at::Tensor& out_o, const at::Tensor& out_lse) {
  const int64_t world_size = buffers.numel();
  CHECK_ARG(1 <= world_size && world_size <= kOneShotMaxRanks,
            "buffers must hold the addresses of 1 to ", kOneShotMaxRanks,
            " buffers, one for each rank, got ", world_size);
  CHECK_ARG(0 <= rank && rank < world_size, "rank must be in [0, ", world_size, "), got ", rank);
  CHECK_ARG(o.scalar_type() == at::kFloat || o.scalar_type() == at::kBFloat16,
            "o must be float32 or bfloat16, got ", dtype_name(o.scalar_type()));
  CHECK_ARG(o.dim() >= 1 && o.size(-1) >= 1, "o must have shape [..., head_dim], got ", o.sizes());
  const auto rows = o.sizes().slice(0, o.dim() - 1);
  check(o, "o", o.scalar_type(), o.sizes(), o.device());
  check(lse, "lse", at::kFloat, rows, o.device());
  check(out_o, "out_o", out_o.scalar_type(), o.sizes(), o.device());
  check(out_lse, "out_lse", at::kFloat, rows, o.device());
  check(buffers, "buffers", at::kLong, {world_size}, o.device());
  check(control, "control", at::kInt, {4}, o.device());
  check(host, "host", at::kLong, {2 + kOneShotMaxRanks}, at::kCPU);
  check_alignment(o, "o");
  check_alignment(out_o, "out_o");
  const int64_t row_bytes = o.size(-1) * o.element_size();
  CHECK_ARG(row_bytes % kOneShotAlignment == 0, "rows of o must have a size that is a multiple of ",
            kOneShotAlignment, " bytes, got ", row_bytes);
  const int64_t state_bytes = one_shot_state_bytes(lse.numel(), row_bytes);
  CHECK_ARG(slot_bytes % kOneShotAlignment == 0 && state_bytes <= slot_bytes,
            "slot_bytes must be a multiple of ", kOneShotAlignment, " and at least ", state_bytes,
            ", the bytes of this state, got ", slot_bytes);

  OneShotParams params{};
  params.o = o.const_data_ptr();
  params.lse = elements<float>(lse);
  params.out_o = out_o.data_ptr();
  params.out_lse = out_lse.data_ptr<float>();
  params.buffers = elements<int64_t>(buffers);
  params.control = static_cast<OneShotControl*>(control.data_ptr());
  params.host = static_cast<OneShotHost*>(host.data_ptr());
  params.slot_bytes = slot_bytes;
  params.num_rows = lse.numel();
  params.head_dim = static_cast<int32_t>(o.size(-1));
  params.rank = static_cast<int32_t>(rank);
  params.world_size = static_cast<int32_t>(world_size);
  params.dtype = data_type(o.scalar_type(), kOp, "o");
  params.out_dtype = data_type(out_o.scalar_type(), kOp, "out_o");
  return params;
}

}  // namespace tree_attention::cuda
