// SPDX-License-Identifier: BSD-3-Clause
#include "args/index.h"

#include <c10/util/accumulate.h>

#include <cmath>
#include <limits>

#include "args/checks.h"
#include "args/empty_tensor.h"

namespace tree_attention {
namespace {

constexpr const char* kOp = "index_topk";
constexpr const char* kMerge = "merge_topk";
constexpr ArgumentChecks kCheck{kOp};
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int32_t checked_topk(const char* op, int64_t topk, int64_t num_rows) {
  TORCH_CHECK_VALUE(topk >= 1, op, ": topk must be at least 1, got ", topk);
  const int64_t most = kMaxInt32 / std::max<int64_t>(1, num_rows);
  TORCH_CHECK_VALUE(topk <= most, op, ": topk must be at most ", most, ", which is 2^31 - 1 over ",
                    num_rows, " rows, got ", topk);
  return static_cast<int32_t>(topk);
}

void check_queries_and_keys(IndexParams& p, const IndexArgs& args) {
  const auto& [q, k] = std::tie(args.q, args.k);
  const bool paged = args.page_table.has_value();
  const char* k_axes =
      paged ? "[num_pages, 1, page_size, head_dim]" : "[batch, 1, seqlen_k, head_dim]";
  CHECK_ARG(q.dim() == 4, "q must have shape [batch, num_heads, seqlen_q, head_dim], got ",
            q.sizes());
  p.dtype = data_type(q.scalar_type(), kOp, "q");
  CHECK_ARG(q.size(1) >= 1, "q must have at least 1 head, got ", q.sizes());
  CHECK_ARG(q.size(3) >= 1, "q must have a head_dim of at least 1, got ", q.sizes());
  CHECK_ARG(k.dim() == 4, "k must have shape ", k_axes, ", got ", k.sizes());
  kCheck.dtype("k", k, q.scalar_type());
  kCheck.device("k", k, "q", q);
  kCheck.last_axis("q", q);
  kCheck.last_axis("k", k);
  CHECK_ARG(k.size(1) == 1, "k must have 1 head, which all heads of q share, got ", k.size(1),
            "; its axes are ", k_axes);
  CHECK_ARG(k.size(3) == q.size(3), "k must have q's head_dim ", q.size(3), ", got ", k.size(3));
  CHECK_ARG(paged || k.size(0) == q.size(0), "k must have q's batch ", q.size(0), ", got ",
            k.size(0));
  CHECK_ARG(!paged || k.size(2) >= 1, "k must have a page_size of at least 1, got ", k.size(2));
  p.batch = q.size(0);
  p.num_heads = kCheck.to_int32("num_heads", q.size(1));
  p.seqlen_q = q.size(2);
  p.head_dim = kCheck.to_int32("head_dim", q.size(3));
  p.seqlen_k = k.size(2);
  p.q = q.const_data_ptr();
  p.k = k.const_data_ptr();
  copy_strides(p.q_stride, q);
  p.k_stride[0] = k.stride(0);
  p.k_stride[1] = k.stride(2);
}

void check_pages(IndexParams& p, const IndexArgs& args) {
  if (!args.page_table) return;
  const at::Tensor& table = *args.page_table;
  kCheck.dtype("page_table", table, at::kInt);
  kCheck.device("page_table", table, "q", args.q);
  CHECK_ARG(table.dim() == 2 && table.size(0) == p.batch,
            "page_table must have shape [batch, pages] with batch ", p.batch, ", got ",
            table.sizes());
  kCheck.last_axis("page_table", table);
  p.page_table = elements<int32_t>(table);
  p.page_table_stride = table.stride(0);
  p.page_size = kCheck.to_int32("page_size", args.k.size(2));
  p.num_pages = kCheck.to_int32("num_pages", args.k.size(0));
  p.seqlen_k = table.size(1) * args.k.size(2);
}

void check_weights_and_ranges(IndexParams& p, const IndexArgs& args) {
  if (args.weights) {
    const at::Tensor& weights = *args.weights;
    kCheck.dtype("weights", weights, at::kFloat);
    kCheck.device("weights", weights, "q", args.q);
    kCheck.shape("weights", "[batch, num_heads, seqlen_q]", weights, args.q.sizes().slice(0, 3));
    p.weights = elements<float>(weights);
    copy_strides(p.weights_stride, weights);
  }
  if (args.key_ranges) {
    const at::Tensor& ranges = *args.key_ranges;
    kCheck.dtype("key_ranges", ranges, at::kInt);
    kCheck.device("key_ranges", ranges, "q", args.q);
    kCheck.shape("key_ranges", "[batch, seqlen_q, 2]", ranges, {p.batch, p.seqlen_q, 2});
    kCheck.last_axis("key_ranges", ranges);
    p.key_ranges = elements<int32_t>(ranges);
    p.key_ranges_stride[0] = ranges.stride(0);
    p.key_ranges_stride[1] = ranges.stride(1);
  }
}

void check_blocks(IndexParams& p, const IndexArgs& args) {
  CHECK_ARG(args.block >= 1 && args.block <= kMaxInt32, "block must be from 1 to ", kMaxInt32,
            ", got ", args.block);
  CHECK_ARG(args.local_blocks >= 0 && args.local_blocks <= kMaxInt32,
            "local_blocks must be from 0 to ", kMaxInt32, ", got ", args.local_blocks);
  CHECK_ARG(args.local_blocks == 0 || args.block >= 2,
            "local_blocks needs a block of at least 2 keys, got ", args.block);
  CHECK_ARG(args.local_blocks == 0 || args.query_positions,
            "local_blocks needs query_positions, got None");
  p.block = static_cast<int32_t>(args.block);
  p.local_blocks = static_cast<int32_t>(args.local_blocks);
  if (!args.query_positions) return;
  const at::Tensor& positions = *args.query_positions;
  kCheck.dtype("query_positions", positions, at::kLong);
  kCheck.device("query_positions", positions, "q", args.q);
  kCheck.shape("query_positions", "[batch, seqlen_q]", positions, {p.batch, p.seqlen_q});
  p.query_positions = elements<int64_t>(positions);
  p.query_positions_stride[0] = positions.stride(0);
  p.query_positions_stride[1] = positions.stride(1);
}

}  // namespace

IndexCall prepare_index(const IndexArgs& args) {
  IndexCall call{};
  IndexParams& p = call.params;
  check_queries_and_keys(p, args);
  check_pages(p, args);
  check_weights_and_ranges(p, args);
  p.topk = checked_topk(kOp, args.topk, p.batch);
  // Written so that NaN fails.
  CHECK_ARG(std::abs(args.scale) <= kLargestScale, "scale must be in [", -kLargestScale, ", ",
            kLargestScale, "], got ", args.scale);
  p.scale = static_cast<float>(args.scale);
  check_blocks(p, args);
  if (args.key_slots) {
    const at::Tensor& slots = *args.key_slots;
    kCheck.dtype("key_slots", slots, at::kInt);
    kCheck.device("key_slots", slots, "q", args.q);
    kCheck.shape("key_slots", "[seqlen_k]", slots, {p.seqlen_k});
    kCheck.last_axis("key_slots", slots);
    p.key_slots = elements<int32_t>(slots);
  } else {
    kCheck.to_int32("seqlen_k", p.seqlen_k);
  }
  CHECK_ARG(args.num_workers >= -1 && args.num_workers <= kMaxInt32,
            "num_workers must be from -1 to ", kMaxInt32, ", got ", args.num_workers);
  p.num_workers = args.num_workers;

  const std::vector<int64_t> sizes{p.batch, p.num_choices(), p.seqlen_q, p.topk};
  call.scores = empty_tensor(sizes, args.q.options().dtype(at::kFloat));
  call.slots = empty_tensor(sizes, args.q.options().dtype(at::kInt));
  p.scores = static_cast<float*>(call.scores.mutable_data_ptr());
  p.slots = static_cast<int32_t*>(call.slots.mutable_data_ptr());
  return call;
}

MergeTopkCall prepare_merge_topk(const at::Tensor& scores, const at::Tensor& slots, int64_t topk) {
  constexpr ArgumentChecks kMergeCheck{kMerge};
  TORCH_CHECK_VALUE(scores.dim() >= 2 && scores.size(0) >= 1, kMerge,
                    ": scores must have shape [n, ..., k] with n of at least 1, got ",
                    scores.sizes());
  kMergeCheck.dtype("scores", scores, at::kFloat);
  kMergeCheck.dtype("slots", slots, at::kInt);
  kMergeCheck.device("slots", slots, "scores", scores);
  TORCH_CHECK_VALUE(slots.sizes() == scores.sizes(), kMerge,
                    ": slots must have the shape of scores = ", scores.sizes(), ", got ",
                    slots.sizes());
  MergeTopkCall call{};
  MergeTopkParams& p = call.params;
  p.topk = checked_topk(kMerge, topk, 1);
  p.num_parts = scores.size(0);
  p.num_entries = scores.size(-1);
  std::vector<int64_t> sizes = scores.sizes().slice(1).vec();
  sizes.back() = topk;
  p.num_rows = c10::multiply_integers(scores.sizes().slice(1, scores.dim() - 2));
  const std::vector<int64_t> parts{p.num_parts, p.num_rows, p.num_entries};
  call.scores_parts = scores.reshape(parts);
  call.slots_parts = slots.reshape(parts);
  call.scores = empty_tensor(sizes, scores.options());
  call.slots = empty_tensor(sizes, slots.options());
  p.scores_parts = elements<float>(call.scores_parts);
  p.slots_parts = elements<int32_t>(call.slots_parts);
  copy_strides(p.scores_stride, call.scores_parts);
  copy_strides(p.slots_stride, call.slots_parts);
  p.scores = static_cast<float*>(call.scores.mutable_data_ptr());
  p.slots = static_cast<int32_t*>(call.slots.mutable_data_ptr());
  return call;
}

}  // namespace tree_attention
