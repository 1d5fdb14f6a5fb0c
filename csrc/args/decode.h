// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors to DecodeParams: the only validation of lean_decode, shared by every backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "common/decode_params.h"

namespace tree_attention {

// Every argument of lean_decode except the outputs, in the order of its schema: the C++ type, the
// schema's type, the name and the schema's default. Arguments after the star are given by name.
#define TREE_ATTENTION_DECODE_ARGUMENTS(FIRST, NEXT)                     \
  FIRST(at::Tensor, "Tensor", q, "")                                     \
  NEXT(at::Tensor, "Tensor", k, "")                                      \
  NEXT(at::Tensor, "Tensor", v, "")                                      \
  NEXT(std::optional<at::Tensor>, "Tensor?", key_ranges, "=None")        \
  NEXT(std::optional<double>, "*, float?", softmax_scale, "=None")       \
  NEXT(double, "float", softcap, "=0.0")                                 \
  NEXT(std::optional<at::Tensor>, "Tensor?", alibi_slopes, "=None")      \
  NEXT(std::optional<at::Tensor>, "Tensor?", query_positions, "=None")   \
  NEXT(at::IntArrayRef, "int[]", key_layout, "=[0, 1, 1]")               \
  NEXT(std::optional<at::Tensor>, "Tensor?", page_table, "=None")        \
  NEXT(std::optional<at::Tensor>, "Tensor?", k_scale, "=None")           \
  NEXT(std::optional<at::Tensor>, "Tensor?", v_scale, "=None")           \
  NEXT(std::optional<at::ScalarType>, "ScalarType?", out_dtype, "=None") \
  NEXT(int64_t, "int", num_workers, "=0")                                \
  NEXT(std::optional<at::ScalarType>, "ScalarType?", result_dtype, "=None")

// These arguments in a schema, as one string literal.
#define TREE_ATTENTION_DECODE_SCHEMA \
  TREE_ATTENTION_DECODE_ARGUMENTS(TREE_ATTENTION_IN_SCHEMA, TREE_ATTENTION_NEXT_IN_SCHEMA)
#define TREE_ATTENTION_IN_SCHEMA(type, schema_type, name, value) schema_type " " #name value
#define TREE_ATTENTION_NEXT_IN_SCHEMA(type, schema_type, name, value) \
  ", " schema_type " " #name value

// The arguments and the number of ranges that each are a sequence (ranges.h). result_dtype is the
// dtype of what the states are merged to, where the call is a part of another.
struct DecodeArgs {
#define TREE_ATTENTION_MEMBER(type, schema_type, name, value) type name;
  TREE_ATTENTION_DECODE_ARGUMENTS(TREE_ATTENTION_MEMBER, TREE_ATTENTION_MEMBER)
#undef TREE_ATTENTION_MEMBER
  int64_t num_ranges = 1;
};

// Checks the inputs and returns params that lack only the outputs. An error names the argument,
// what is required of it, and the value that was given.
DecodeParams check_inputs(const DecodeArgs& args);

// Allocates o and lse for checked inputs.
std::tuple<at::Tensor, at::Tensor> allocate_outputs(const DecodeArgs& args);

// Checks o and lse against the inputs and completes the params.
void set_outputs(DecodeParams& params, const DecodeArgs& args, const at::Tensor& o,
                 const at::Tensor& lse);

}  // namespace tree_attention
