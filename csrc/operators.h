// SPDX-License-Identifier: BSD-3-Clause
//
// The operators over the kernels of any backend. `launch` runs with the device of the inputs
// current; the outputs follow the inputs, as in the schemas of ops.cpp.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <type_traits>
#include <vector>

#include "args/append.h"
#include "args/cascade.h"
#include "args/checks.h"
#include "args/decode.h"
#include "args/empty_tensor.h"
#include "args/index.h"
#include "args/merge.h"
#include "args/ranges.h"

namespace tree_attention {

template <void (*launch)(const DecodeParams&), void (*launch_merge)(const MergeParams&),
          void (*launch_ranges)(const RangeParams&)>
struct DecodeCalls {
  static std::tuple<at::Tensor, at::Tensor> run(const DecodeArgs& args) {
    if (!has_several_ranges(args)) return run_range(args);
    const at::ScalarType out_dtype = args.out_dtype.value_or(args.q.scalar_type());
    const RangeParts parts(args, out_dtype);
    if (!parts.are_several()) return run_range(parts.call());
    const auto [o, lse] = run_parts(parts);
    const MergeCall merge = prepare_merge(parts.by_range(o), parts.by_range(lse), out_dtype);
    launch_merge(merge.params);
    return {merge.o, merge.lse};
  }

  static void run_out(const DecodeArgs& args, const at::Tensor& o, const at::Tensor& lse) {
    if (!has_several_ranges(args)) return run_range_out(args, o, lse);
    const RangeParts parts(args, o.scalar_type());
    if (!parts.are_several()) return run_range_out(parts.call(), o, lse);
    DecodeParams unused{};
    set_outputs(unused, args, o, lse);
    const auto [o_parts, lse_parts] = run_parts(parts);
    // The merge writes contiguous outputs; the caller's have any strides.
    const at::Tensor merged_o = o.is_contiguous() ? o : empty_tensor(o.sizes(), o.options());
    const at::Tensor merged_lse =
        lse.is_contiguous() ? lse : empty_tensor(lse.sizes(), lse.options());
    launch_merge(
        prepare_merge(parts.by_range(o_parts), parts.by_range(lse_parts), merged_o, merged_lse)
            .params);
    if (!merged_o.is_same(o)) o.copy_(merged_o);
    if (!merged_lse.is_same(lse)) lse.copy_(merged_lse);
  }

 private:
  static std::tuple<at::Tensor, at::Tensor> run_range(const DecodeArgs& args) {
    DecodeParams params = check_inputs(args);
    auto [o, lse] = allocate_outputs(args);
    set_outputs(params, args, o, lse);
    launch(params);
    return {o, lse};
  }

  static void run_range_out(const DecodeArgs& args, const at::Tensor& o, const at::Tensor& lse) {
    DecodeParams params = check_inputs(args);
    set_outputs(params, args, o, lse);
    launch(params);
  }

  static std::tuple<at::Tensor, at::Tensor> run_parts(const RangeParts& parts) {
    launch_ranges(parts.params());
    return run_range(parts.call());
  }
};

template <typename Calls, typename... Args>
struct DecodeOperators {
  static std::tuple<at::Tensor, at::Tensor> run(Args... inputs) {
    const DecodeArgs args{inputs...};
    const c10::DeviceGuard guard(args.q.device());
    return Calls::run(args);
  }

  static void run_out(Args... inputs, at::Tensor& o, at::Tensor& lse) {
    const DecodeArgs args{inputs...};
    const c10::DeviceGuard guard(args.q.device());
    Calls::run_out(args, o, lse);
  }
};

// Raises what the operators above would, before anything is allocated or written. `check` refuses
// what the backend does not take.
template <void (*check)(const DecodeParams&)>
void check_arguments(const DecodeArgs& args) {
  if (has_several_ranges(args)) {
    check_each_range(args, check);
  } else {
    check(check_inputs(args));
  }
}

template <void (*check)(const DecodeParams&), typename... Args>
struct DecodeCheck {
  static void run(Args... inputs) {
    const DecodeArgs args{inputs...};
    const c10::DeviceGuard guard(args.q.device());
    check_arguments<check>(args);
  }
};

// Calls of lean_decode for pages that sequences begin with in common, and one for the others.
template <typename Calls, void (*check)(const DecodeParams&),
          void (*launch_merge)(const MergeParams&), typename... Args>
struct CascadeOperator {
  static std::tuple<at::Tensor, at::Tensor> run(Args... inputs, at::OptionalIntArrayRef groups,
                                                std::optional<int64_t> least_keys_saved) {
    const DecodeArgs args{inputs...};
    const c10::DeviceGuard guard(args.q.device());
    check_cascade(args);
    check_arguments<check>(args);
    const std::vector<PageGroup> found = groups_of(args, groups, least_keys_saved);
    if (found.empty()) return Calls::run(args);
    const CascadeParts parts(args, found);
    for (size_t i = 0; i < found.size(); ++i) {
      const CascadeCall call = parts.of_group(i);
      Calls::run_out(call.args, call.o, call.lse);
      call.keep();
    }
    const CascadeCall call = parts.of_others();
    Calls::run_out(call.args, call.o, call.lse);
    const MergeCall merge = prepare_merge(parts.o(), parts.lse(), parts.out_dtype());
    launch_merge(merge.params);
    return {merge.o, merge.lse};
  }
};

// How the dispatcher passes an argument, whose type it compares with the schema.
template <typename T>
using PassedAs = std::conditional_t<
    std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>, const T&, T>;
#define TREE_ATTENTION_PASSED(type, schema_type, name, value) , PassedAs<type>

template <void (*launch)(const DecodeParams&), void (*launch_merge)(const MergeParams&),
          void (*launch_ranges)(const RangeParams&)>
using LeanDecode = DecodeOperators<
    DecodeCalls<launch, launch_merge, launch_ranges> TREE_ATTENTION_DECODE_ARGUMENTS(
        TREE_ATTENTION_PASSED, TREE_ATTENTION_PASSED)>;

template <void (*check)(const DecodeParams&)>
using CheckDecode = DecodeCheck<check TREE_ATTENTION_DECODE_ARGUMENTS(TREE_ATTENTION_PASSED,
                                                                      TREE_ATTENTION_PASSED)>;

template <void (*launch)(const DecodeParams&), void (*check)(const DecodeParams&),
          void (*launch_merge)(const MergeParams&), void (*launch_ranges)(const RangeParams&)>
using CascadeDecode = CascadeOperator<DecodeCalls<launch, launch_merge, launch_ranges>, check,
                                      launch_merge TREE_ATTENTION_DECODE_ARGUMENTS(
                                          TREE_ATTENTION_PASSED, TREE_ATTENTION_PASSED)>;

#undef TREE_ATTENTION_PASSED

// For tests: how many blocks on a multiprocessor the plan of a call counts on, how many the device
// has room for, and whether the call takes the kernel by wgmma.
using PlanFacts = std::tuple<int64_t, int64_t, bool>;
template <PlanFacts (*ask)(const DecodeParams&)>
PlanFacts lean_decode_plan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::optional<at::Tensor>& page_table) {
  const c10::DeviceGuard guard(q.device());
  const int64_t key_layout[] = {0, 1, 1};
  DecodeArgs args{};
  args.q = q;
  args.k = k;
  args.v = v;
  args.page_table = page_table;
  args.key_layout = key_layout;
  if (has_8_bits(k.scalar_type())) {
    args.k_scale = args.v_scale =
        empty_tensor(k.sizes().slice(0, 3), q.options().dtype(at::kFloat));
  }
  return ask(check_inputs(args));
}

template <void (*launch)(const MergeParams&)>
struct MergeStates {
  static std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& o_parts,
                                                const at::Tensor& lse_parts,
                                                std::optional<at::ScalarType> out_dtype) {
    const c10::DeviceGuard guard(o_parts.device());
    const MergeCall call = prepare_merge(o_parts, lse_parts, out_dtype);
    launch(call.params);
    return {call.o, call.lse};
  }

  static void run_out(const at::Tensor& o_parts, const at::Tensor& lse_parts, at::Tensor& o,
                      at::Tensor& lse) {
    const c10::DeviceGuard guard(o_parts.device());
    const MergeCall call = prepare_merge(o_parts, lse_parts, o, lse);
    launch(call.params);
  }
};

// The arguments of AppendArgs, in the order of the schema.
template <void (*launch)(const AppendParams&)>
void append_kv(const at::Tensor& k, const std::optional<at::Tensor>& v, at::Tensor& k_cache,
               const std::optional<at::Tensor>& v_cache, const at::Tensor& slot_mapping,
               const std::optional<at::Tensor>& k_scale, const std::optional<at::Tensor>& v_scale,
               bool paged) {
  const c10::DeviceGuard guard(k.device());
  launch(prepare_append({k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, paged}));
}

// The arguments of IndexArgs, in the order of the schema.
template <void (*launch)(const IndexParams&)>
std::tuple<at::Tensor, at::Tensor> index_topk(
    const at::Tensor& q, const at::Tensor& k, const std::optional<at::Tensor>& weights,
    const std::optional<at::Tensor>& key_ranges, int64_t topk, double scale, int64_t block,
    int64_t local_blocks, const std::optional<at::Tensor>& key_slots,
    const std::optional<at::Tensor>& query_positions, const std::optional<at::Tensor>& page_table,
    int64_t num_workers) {
  const c10::DeviceGuard guard(q.device());
  const IndexCall call = prepare_index({q, k, weights, key_ranges, topk, scale, block, local_blocks,
                                        key_slots, query_positions, page_table, num_workers});
  launch(call.params);
  return {call.scores, call.slots};
}

template <void (*launch)(const MergeTopkParams&)>
std::tuple<at::Tensor, at::Tensor> merge_topk(const at::Tensor& scores, const at::Tensor& slots,
                                              int64_t topk) {
  const c10::DeviceGuard guard(scores.device());
  const MergeTopkCall call = prepare_merge_topk(scores, slots, topk);
  launch(call.params);
  return {call.scores, call.slots};
}

}  // namespace tree_attention
