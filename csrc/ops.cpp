// SPDX-License-Identifier: BSD-3-Clause
//
// The table of contents: every operator, its schema and its backends.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/stable/library.h>
#include <torch/library.h>

#include <string>

#include "cpu/append.h"
#include "cpu/decode.h"
#include "cpu/index/index.h"
#include "cpu/merge.h"
#include "cpu/ranges.h"
#include "experts/operator.h"
#include "operators.h"
#include "schedule.h"
#ifdef TREE_ATTENTION_WITH_CUDA
#include "cuda/one_shot/one_shot_args.h"
#include "cuda/ops_cuda.h"
#endif

namespace tree_attention {
namespace {

// check_decode speaks of the operator whose arguments it checks.
std::string name_in_errors(const c10::OperatorHandle& op) {
  const std::string name = op.schema().name().substr(sizeof("tree_attention::") - 1);
  return name == "check_decode" ? "lean_decode" : name;
}

// The operators have no derivative. Without this error the results would silently carry no
// gradient.
void refuse_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  if (at::GradMode::is_enabled()) {
    const size_t num_arguments = op.schema().arguments().size();
    for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
      TORCH_CHECK(!(*stack)[i].isTensor() || !(*stack)[i].toTensor().requires_grad(),
                  name_in_errors(op), ": ",
                  op.schema().arguments()[i - (stack->size() - num_arguments)].name(),
                  " must not require a gradient (inference only), got requires_grad=True; call it "
                  "under torch.no_grad()");
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

// The way to define a schema whose symbol torch 2.11 and 2.12 share; its other way has two.
STABLE_TORCH_LIBRARY(tree_attention, m) {
  m.def("lean_decode(" TREE_ATTENTION_DECODE_SCHEMA ") -> (Tensor o, Tensor lse)");
  m.def("lean_decode.out(" TREE_ATTENTION_DECODE_SCHEMA ", Tensor(a!) o, Tensor(b!) lse) -> ()");
  m.def("check_decode(" TREE_ATTENTION_DECODE_SCHEMA ") -> ()");
  m.def("cascade_decode(" TREE_ATTENTION_DECODE_SCHEMA
        ", int[]? groups=None, int? least_keys_saved=None) -> (Tensor o, Tensor lse)");
  m.def(
      "page_groups(Tensor page_table, int[] num_pages, int page_size, int num_heads_q, "
      "int num_heads_kv, int head_dim, bool has_8_bits, int? least_keys_saved=None) -> int[]");
  m.def(
      "lean_decode_plan(Tensor q, Tensor k, Tensor v, Tensor? page_table=None) "
      "-> (int planned, int resident, bool uses_wgmma)");
  m.def(
      "merge_states(Tensor o_parts, Tensor lse_parts, *, ScalarType? out_dtype=None) "
      "-> (Tensor o, Tensor lse)");
  m.def(
      "merge_states.out(Tensor o_parts, Tensor lse_parts, *, Tensor(a!) o, Tensor(b!) lse) "
      "-> ()");
  m.def(
      "one_shot(Tensor o, Tensor lse, Tensor buffers, Tensor(a!) control, Tensor(b!) host, "
      "int rank, int slot_bytes, Tensor(c!) out_o, Tensor(d!) out_lse) -> ()");
  m.def(
      "append_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor "
      "slot_mapping, "
      "*, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, bool paged=False) -> ()");
  m.def("lean_schedule(Tensor num_tiles, int num_workers) -> Tensor");
  m.def(
      "index_topk(Tensor q, Tensor k, Tensor? weights=None, Tensor? key_ranges=None, *, int topk, "
      "float scale=1.0, int block=1, int local_blocks=0, Tensor? key_slots=None, Tensor? "
      "query_positions=None, Tensor? page_table=None, int num_workers=0) -> (Tensor scores, Tensor "
      "slots)");
  m.def("merge_topk(Tensor scores, Tensor slots, *, int topk) -> (Tensor scores, Tensor slots)");
  m.def(
      "linear_of_experts(Tensor x, Tensor experts, Tensor weight, Tensor? scale, int front, bool "
      "is_transposed) -> Tensor");
}

TORCH_LIBRARY_IMPL(tree_attention, CPU, m) {
  m.impl("lean_decode", LeanDecode<cpu::lean_decode, cpu::merge_states, cpu::split_ranges>::run);
  m.impl("lean_decode.out",
         LeanDecode<cpu::lean_decode, cpu::merge_states, cpu::split_ranges>::run_out);
  m.impl("check_decode", CheckDecode<cpu::check_decode>::run);
  m.impl("cascade_decode", CascadeDecode<cpu::lean_decode, cpu::check_decode, cpu::merge_states,
                                         cpu::split_ranges>::run);
  m.impl("page_groups", page_groups);
  m.impl("merge_states", MergeStates<cpu::merge_states>::run);
  m.impl("merge_states.out", MergeStates<cpu::merge_states>::run_out);
  m.impl("append_kv", append_kv<cpu::append_kv>);
  m.impl("lean_schedule", lean_schedule);
  m.impl("linear_of_experts", linear_of_experts);
  m.impl("index_topk", index_topk<cpu::index_topk>);
  m.impl("merge_topk", merge_topk<cpu::merge_topk>);
}

#ifdef TREE_ATTENTION_WITH_CUDA
TORCH_LIBRARY_IMPL(tree_attention, CUDA, m) {
  m.impl("lean_decode", LeanDecode<cuda::lean_decode, cuda::merge_states, cuda::split_ranges>::run);
  m.impl("lean_decode.out",
         LeanDecode<cuda::lean_decode, cuda::merge_states, cuda::split_ranges>::run_out);
  m.impl("check_decode", CheckDecode<cuda::check_decode>::run);
  m.impl("cascade_decode", CascadeDecode<cuda::lean_decode, cuda::check_decode, cuda::merge_states,
                                         cuda::split_ranges>::run);
  m.impl("merge_states", MergeStates<cuda::merge_states>::run);
  m.impl("merge_states.out", MergeStates<cuda::merge_states>::run_out);
  m.impl("one_shot", cuda::one_shot<cuda::launch_one_shot>);
  m.impl("lean_decode_plan", lean_decode_plan<cuda::lean_decode_plan>);
  m.impl("append_kv", append_kv<cuda::append_kv>);
}
#endif

TORCH_LIBRARY_IMPL(tree_attention, Autograd, m) {
  for (const char* name :
       {"lean_decode", "lean_decode.out", "check_decode", "cascade_decode", "merge_states",
        "merge_states.out", "append_kv", "linear_of_experts", "index_topk", "merge_topk"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_gradient>());
  }
}

}  // namespace tree_attention
