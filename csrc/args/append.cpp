// SPDX-License-Identifier: BSD-3-Clause
#include "args/append.h"

#include "args/checks.h"
#include "args/memory_overlap.h"

namespace tree_attention {
namespace {

constexpr const char* kOp = "append_kv";
constexpr ArgumentChecks kCheck{kOp};

AppendTensor append_tensor(const at::Tensor& rows, const at::Tensor& cache,
                           const std::optional<at::Tensor>& scale) {
  AppendTensor result{};
  result.rows = rows.const_data_ptr();
  result.cache = cache.data_ptr();
  copy_strides(result.stride, rows);
  copy_strides(result.cache_stride, cache);
  if (scale) {
    result.scale = scale->data_ptr<float>();
    copy_strides(result.scale_stride, *scale);
  }
  result.head_dim = rows.size(3);
  return result;
}

// What v and v_cache must have in common with k and k_cache.
void check_values(const AppendArgs& args, const char* axes, const char* cache_axes) {
  const at::Tensor &k = args.k, &k_cache = args.k_cache, &v = *args.v, &v_cache = *args.v_cache;
  CHECK_ARG(v.dim() == 4, "v must have shape ", axes, ", got ", v.sizes());
  CHECK_ARG(v_cache.dim() == 4, "v_cache must have shape ", cache_axes, ", got ", v_cache.sizes());
  kCheck.dtype("v", v, k.scalar_type());
  kCheck.dtype("v_cache", v_cache, k_cache.scalar_type());
  kCheck.device("v", v, "k", k);
  kCheck.device("v_cache", v_cache, "k", k);
  CHECK_ARG(k.sizes().slice(0, 3) == v.sizes().slice(0, 3), "v must have k's first three axes ",
            k.sizes().slice(0, 3), ", got ", v.sizes().slice(0, 3));
  CHECK_ARG(k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3),
            "v_cache must have k_cache's first three axes ", k_cache.sizes().slice(0, 3), ", got ",
            v_cache.sizes().slice(0, 3));
  CHECK_ARG(v_cache.size(3) == v.size(3), "v_cache must have v's head_dim ", v.size(3), ", got ",
            v_cache.size(3));
  kCheck.last_axis("v", v);
  kCheck.last_axis("v_cache", v_cache);
}

}  // namespace

AppendParams prepare_append(const AppendArgs& args) {
  const auto& [k, v, k_cache, v_cache, slots, k_scale, v_scale, paged] = args;
  constexpr const char* kAxes = "[batch, num_heads_kv, tokens, head_dim]";
  const char* cache_axes = paged ? "[num_pages, num_heads_kv, page_size, head_dim]"
                                 : "[batch, num_heads_kv, capacity, head_dim]";
  CHECK_ARG(k.dim() == 4, "k must have shape ", kAxes, ", got ", k.sizes());
  CHECK_ARG(k_cache.dim() == 4, "k_cache must have shape ", cache_axes, ", got ", k_cache.sizes());
  AppendParams params{};
  params.dtype = data_type(k.scalar_type(), kOp, "k");
  if (has_8_bits(k_cache.scalar_type())) {
    params.cache_dtype = kv_data_type(k_cache.scalar_type(), params.dtype);
  } else {
    params.cache_dtype = data_type(k_cache.scalar_type(), kOp, "k_cache");
  }
  kCheck.dtype("slot_mapping", slots, at::kLong);
  const auto check_device = [&](const char* name, const at::Tensor& tensor) {
    kCheck.device(name, tensor, "k", k);
  };
  check_device("k_cache", k_cache);
  check_device("slot_mapping", slots);
  if (k_scale) check_device("k_scale", *k_scale);
  if (v_scale) check_device("v_scale", *v_scale);
  CHECK_ARG(v.has_value() == v_cache.has_value(), "v and v_cache must be given together, got ",
            v ? "v" : "v_cache", " alone");
  CHECK_ARG(v || !v_scale, "v_scale must be None without v, got a tensor of shape ",
            v_scale->sizes());
  if (v) check_values(args, kAxes, cache_axes);
  CHECK_ARG(paged || k_cache.size(0) == k.size(0), "k_cache must have k's batch ", k.size(0),
            ", got ", k_cache.size(0));
  CHECK_ARG(k_cache.size(1) == k.size(1), "k_cache must have k's num_heads_kv ", k.size(1),
            ", got ", k_cache.size(1));
  CHECK_ARG(k_cache.size(3) == k.size(3), "k_cache must have k's head_dim ", k.size(3), ", got ",
            k_cache.size(3));
  CHECK_ARG(!paged || k_cache.size(2) >= 1, "k_cache must have a page_size of at least 1, got ",
            k_cache.size(2));
  kCheck.shape("slot_mapping", "[batch, tokens]", slots, {k.size(0), k.size(2)});
  kCheck.last_axis("k", k);
  kCheck.last_axis("k_cache", k_cache);
  kCheck.scales(paged ? "[num_pages, num_heads_kv, page_size]" : "[batch, num_heads_kv, capacity]",
                k_cache, k_scale, v ? v_scale : k_scale);
  check_outputs(
      kOp, {{"k_cache", k_cache}, {"v_cache", v_cache}, {"k_scale", k_scale}, {"v_scale", v_scale}},
      {{"k", k}, {"v", v}, {"slot_mapping", slots}});

  params.k = append_tensor(k, k_cache, k_scale);
  if (v) params.v = append_tensor(*v, *v_cache, v_scale);
  params.slots = elements<int64_t>(slots);
  params.slots_stride[0] = slots.stride(0);
  params.slots_stride[1] = slots.stride(1);
  params.batch = k.size(0);
  params.num_heads_kv = k.size(1);
  params.tokens = k.size(2);
  params.page_size = paged ? k_cache.size(2) : 0;
  params.capacity = paged ? k_cache.size(0) * k_cache.size(2) : k_cache.size(2);
  return params;
}

}  // namespace tree_attention
