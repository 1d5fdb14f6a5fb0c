// SPDX-License-Identifier: BSD-3-Clause
#include "args/decode.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "args/checks.h"
#include "args/empty_tensor.h"
#include "args/memory_overlap.h"

namespace tree_attention {
namespace {

constexpr const char* kOp = "lean_decode";
constexpr ArgumentChecks kCheck{kOp};

void check_keys_and_values(DecodeParams& params, const DecodeArgs& args) {
  const auto& [q, k, v] = std::tie(args.q, args.k, args.v);
  const bool paged = args.page_table.has_value();
  const char* k_axes = paged ? "[num_pages, num_heads_kv, page_size, head_dim]"
                             : "[batch, num_heads_kv, seqlen_k, head_dim]";
  CHECK_ARG(k.dim() == 4, "k must have shape ", k_axes, ", got ", k.sizes());
  CHECK_ARG(v.dim() == 4, "v must have shape ", k_axes, ", got ", v.sizes());
  if (!has_8_bits(k.scalar_type())) kCheck.dtype("k", k, q.scalar_type());
  kCheck.dtype("v", v, k.scalar_type());
  kCheck.device("k", k, "q", q);
  kCheck.device("v", v, "q", q);
  kCheck.last_axis("k", k);
  kCheck.last_axis("v", v);
  CHECK_ARG(k.size(3) == q.size(3), "k must have q's head_dim ", q.size(3), ", got ", k.size(3));
  CHECK_ARG(v.size(3) >= 1, "v must have a head_dim of at least 1, got ", v.size(3));
  CHECK_ARG(k.sizes().slice(0, 3) == v.sizes().slice(0, 3), "v must have k's first three axes ",
            k.sizes().slice(0, 3), ", got ", v.sizes().slice(0, 3));
  CHECK_ARG(k.size(1) >= 1 && q.size(1) % k.size(1) == 0,
            "num_heads_q must be a multiple of num_heads_kv, got ", q.size(1), " and ", k.size(1),
            "; the axes are ", paged ? k_axes : "[batch, heads, tokens, head_dim]");
  CHECK_ARG(paged || k.size(0) == q.size(0), "k must have q's batch ", q.size(0), ", got ",
            k.size(0));
  CHECK_ARG(!paged || k.size(2) >= 1, "k must have a page_size of at least 1, got ", k.size(2));

  params.kv_dtype = kv_data_type(k.scalar_type(), params.dtype);
  params.k = k.const_data_ptr();
  params.v = v.const_data_ptr();
  copy_strides(params.k_stride, k);
  copy_strides(params.v_stride, v);
  params.num_heads_kv = kCheck.to_int32("num_heads_kv", k.size(1));
  params.head_dim_v = kCheck.to_int32("head_dim of v", v.size(3));
  params.seqlen_k = k.size(2);
}

void check_pages(DecodeParams& params, const DecodeArgs& args) {
  if (!args.page_table) return;
  const at::Tensor& table = *args.page_table;
  const int64_t batch = args.q.size(0), num_heads_kv = args.k.size(1);
  kCheck.dtype("page_table", table, at::kInt);
  kCheck.device("page_table", table, "q", args.q);
  const bool per_head = table.dim() == 3;
  CHECK_ARG((table.dim() == 2 || per_head) && table.size(0) == batch &&
                (!per_head || table.size(1) == num_heads_kv),
            "page_table must have shape [batch, pages] or [batch, num_heads_kv, pages] with batch ",
            batch, " and num_heads_kv ", num_heads_kv, ", got ", table.sizes());
  kCheck.last_axis("page_table", table);
  params.page_table = elements<int32_t>(table);
  params.page_table_stride[0] = table.stride(0);
  params.page_table_stride[1] = per_head ? table.stride(1) : 0;
  params.page_size = kCheck.to_int32("page_size", args.k.size(2));
  params.num_pages = kCheck.to_int32("num_pages", args.k.size(0));
  params.seqlen_k = table.size(-1) * args.k.size(2);
}

void check_scales(DecodeParams& params, const DecodeArgs& args) {
  kCheck.scales(
      args.page_table ? "[num_pages, num_heads_kv, page_size]" : "[batch, num_heads_kv, seqlen_k]",
      args.k, args.k_scale, args.v_scale);
  const auto set = [&](const char* name, const std::optional<at::Tensor>& scale, const float*& data,
                       int64_t (&strides)[3]) {
    if (!scale) return;
    kCheck.device(name, *scale, "q", args.q);
    copy_strides(strides, *scale);
    data = elements<float>(*scale);
  };
  set("k_scale", args.k_scale, params.k_scale, params.k_scale_stride);
  set("v_scale", args.v_scale, params.v_scale, params.v_scale_stride);
}

void check_key_ranges(DecodeParams& params, const DecodeArgs& args) {
  if (!args.key_ranges) return;
  const at::Tensor& ranges = *args.key_ranges;
  kCheck.dtype("key_ranges", ranges, at::kInt);
  kCheck.device("key_ranges", ranges, "q", args.q);
  kCheck.shape("key_ranges", "[batch, seqlen_q, 2]", ranges, {args.q.size(0), args.q.size(2), 2});
  kCheck.last_axis("key_ranges", ranges);
  params.key_ranges = elements<int32_t>(ranges);
  params.key_ranges_stride[0] = ranges.stride(0);
  params.key_ranges_stride[1] = ranges.stride(1);
}

void check_scores(DecodeParams& params, const DecodeArgs& args) {
  const double scale =
      args.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(args.q.size(3))));
  // The conditions are written so that NaN fails them.
  CHECK_ARG(std::abs(scale) <= kLargestScale, "softmax_scale must be in [", -kLargestScale, ", ",
            kLargestScale, "], got ", scale);
  CHECK_ARG(
      args.softcap == 0 || (1 / kLargestScale <= args.softcap && args.softcap <= kLargestScale),
      "softcap must be 0 or in [", 1 / kLargestScale, ", ", kLargestScale, "], got ", args.softcap);
  params.softmax_scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(args.softcap);

  const at::IntArrayRef layout = args.key_layout;
  CHECK_ARG(layout.size() == 3 && layout[0] >= 0 && layout[1] >= 1 && layout[2] >= layout[1],
            "key_layout must be (first, block, stride) with first >= 0, block >= 1 and stride >= "
            "block, got ",
            layout);
  const __int128 end = layout[0] + __int128{params.seqlen_k / layout[1]} * layout[2] + layout[1];
  CHECK_ARG(end <= std::numeric_limits<int64_t>::max(),
            "key_layout must keep positions below 2^63 over seqlen_k ", params.seqlen_k, ", got ",
            layout);
  params.key_layout = {layout[0], layout[1], layout[2]};

  if (args.query_positions) {
    const at::Tensor& positions = *args.query_positions;
    kCheck.dtype("query_positions", positions, at::kLong);
    kCheck.device("query_positions", positions, "q", args.q);
    kCheck.shape("query_positions", "[batch, seqlen_q]", positions,
                 {args.q.size(0), args.q.size(2)});
    params.query_positions = elements<int64_t>(positions);
    params.query_positions_stride[0] = positions.stride(0);
    params.query_positions_stride[1] = positions.stride(1);
  }
  if (args.alibi_slopes) {
    const at::Tensor& slopes = *args.alibi_slopes;
    CHECK_ARG(args.query_positions, "alibi_slopes needs query_positions, got None");
    kCheck.dtype("alibi_slopes", slopes, at::kFloat);
    kCheck.device("alibi_slopes", slopes, "q", args.q);
    kCheck.shape("alibi_slopes", "[num_heads_q]", slopes, {args.q.size(1)});
    kCheck.last_axis("alibi_slopes", slopes);
    params.alibi_slopes = elements<float>(slopes);
  }
}

at::ScalarType out_dtype(const DecodeArgs& args) {
  return args.out_dtype.value_or(args.q.scalar_type());
}

void set_output_dtypes(DecodeParams& params, const DecodeArgs& args, at::ScalarType dtype,
                       const char* argument) {
  params.out_dtype = data_type(dtype, kOp, argument);
  params.result_dtype = data_type(args.result_dtype.value_or(dtype), kOp, "result_dtype");
}

}  // namespace

DecodeParams check_inputs(const DecodeArgs& args) {
  DecodeParams params{};
  const at::Tensor& q = args.q;
  CHECK_ARG(q.dim() == 4, "q must have shape [batch, num_heads_q, seqlen_q, head_dim], got ",
            q.sizes());
  params.dtype = data_type(q.scalar_type(), kOp, "q");
  CHECK_ARG(q.size(3) >= 1, "q must have a head_dim of at least 1, got ", q.size(3));
  kCheck.last_axis("q", q);
  params.q = q.const_data_ptr();
  copy_strides(params.q_stride, q);
  params.batch = kCheck.to_int32("batch", q.size(0));
  params.num_heads_q = kCheck.to_int32("num_heads_q", q.size(1));
  params.seqlen_q = kCheck.to_int32("seqlen_q", q.size(2));
  params.head_dim = kCheck.to_int32("head_dim", q.size(3));

  check_keys_and_values(params, args);
  check_pages(params, args);
  check_scales(params, args);
  kCheck.to_int32("seqlen_k", params.seqlen_k);  // key_ranges are int32
  check_key_ranges(params, args);
  check_scores(params, args);
  set_output_dtypes(params, args, out_dtype(args), "out_dtype");
  CHECK_ARG(args.num_workers >= -1, "num_workers must be at least -1, got ", args.num_workers);
  params.num_workers = kCheck.to_int32("num_workers", args.num_workers);
  params.num_ranges = kCheck.to_int32("num_ranges", args.num_ranges);
  return params;
}

std::tuple<at::Tensor, at::Tensor> allocate_outputs(const DecodeArgs& args) {
  const at::Tensor& q = args.q;
  const auto options = q.options();
  return {empty_tensor({q.size(0), q.size(1), q.size(2), args.v.size(3)},
                       options.dtype(out_dtype(args))),
          empty_tensor({q.size(0), q.size(1), q.size(2)}, options.dtype(at::kFloat))};
}

void set_outputs(DecodeParams& params, const DecodeArgs& args, const at::Tensor& o,
                 const at::Tensor& lse) {
  kCheck.shape("o", "[batch, num_heads_q, seqlen_q, head_dim]", o,
               {args.q.size(0), args.q.size(1), args.q.size(2), args.v.size(3)});
  kCheck.shape("lse", "[batch, num_heads_q, seqlen_q]", lse,
               {args.q.size(0), args.q.size(1), args.q.size(2)});
  CHECK_ARG(!args.out_dtype || o.scalar_type() == *args.out_dtype,
            "out_dtype must be o's dtype or None, got ", dtype_name(*args.out_dtype), " and ",
            dtype_name(o.scalar_type()));
  set_output_dtypes(params, args, o.scalar_type(), "o");
  kCheck.dtype("lse", lse, at::kFloat);
  kCheck.device("o", o, "q", args.q);
  kCheck.device("lse", lse, "q", args.q);
  kCheck.last_axis("o", o);
  check_outputs(kOp, {{"o", o}, {"lse", lse}},
                {{"q", args.q},
                 {"k", args.k},
                 {"v", args.v},
                 {"key_ranges", args.key_ranges},
                 {"alibi_slopes", args.alibi_slopes},
                 {"query_positions", args.query_positions},
                 {"page_table", args.page_table},
                 {"k_scale", args.k_scale},
                 {"v_scale", args.v_scale}});

  params.o = o.data_ptr();
  params.lse = lse.data_ptr<float>();
  copy_strides(params.o_stride, o);
  copy_strides(params.lse_stride, lse);
}

}  // namespace tree_attention
