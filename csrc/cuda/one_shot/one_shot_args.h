// SPDX-License-Identifier: BSD-3-Clause
//
// one_shot: the only validation, shared by the GPU and the tests' emulator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "one_shot.cuh"

namespace tree_attention::cuda {

// Checks the arguments. The params point into the tensors; their `host` is still the host's
// address, for `launch` to replace by the device's.
OneShotParams prepare_one_shot(const at::Tensor& o, const at::Tensor& lse,
                               const at::Tensor& buffers, const at::Tensor& control,
                               const at::Tensor& host, int64_t rank, int64_t slot_bytes,
                               const at::Tensor& out_o, const at::Tensor& out_lse);

// `host` has the 64-bit words of an OneShotHost in host memory.
template <void (*launch)(OneShotParams&)>
void one_shot(const at::Tensor& o, const at::Tensor& lse, const at::Tensor& buffers,
              const at::Tensor& control, const at::Tensor& host, int64_t rank, int64_t slot_bytes,
              const at::Tensor& out_o, const at::Tensor& out_lse) {
  const c10::DeviceGuard guard(o.device());
  OneShotParams params =
      prepare_one_shot(o, lse, buffers, control, host, rank, slot_bytes, out_o, out_lse);
  launch(params);
}

}  // namespace tree_attention::cuda
