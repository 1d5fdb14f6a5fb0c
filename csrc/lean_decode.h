// SPDX-License-Identifier: BSD-3-Clause
//
// lean_decode and lean_decode.out over the kernel of any backend.
#pragma once

#include <c10/core/DeviceGuard.h>

#include "decode_args.h"

namespace tree_attention {

// `launch` runs with q's device current. The outputs follow the inputs, as in the schema.
template <void (*launch)(const DecodeParams&), typename... Args>
struct DecodeOperators {
  static std::tuple<at::Tensor, at::Tensor> run(Args... inputs) {
    const DecodeArgs args{inputs...};
    const c10::DeviceGuard guard(args.q.device());
    DecodeParams params = check_inputs(args);
    auto [o, lse] = allocate_outputs(args);
    set_outputs(params, args, o, lse);
    launch(params);
    return {o, lse};
  }

  static void run_out(Args... inputs, at::Tensor& o, at::Tensor& lse) {
    const DecodeArgs args{inputs...};
    const c10::DeviceGuard guard(args.q.device());
    DecodeParams params = check_inputs(args);
    set_outputs(params, args, o, lse);
    launch(params);
  }
};

// The types are those of DecodeArgs: the dispatcher compares them with the schema.
template <void (*launch)(const DecodeParams&)>
using LeanDecode =
    DecodeOperators<launch, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                    const std::optional<at::Tensor>&, std::optional<double>, double,
                    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                    at::IntArrayRef, const std::optional<at::Tensor>&,
                    std::optional<at::ScalarType>, int64_t>;

}  // namespace tree_attention
