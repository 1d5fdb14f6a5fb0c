# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the kernels for keys and values of 8 bits."""

from pathlib import Path

from mutations import Mutation, Target

INT8 = Target(
    Path("csrc/cuda/instantiations/lean_decode_bf16_int8_64.cu"),
    ("decode_int8_short",),
    ("decode_int8_short",),
)
FLOAT8 = Target(
    Path("csrc/cuda/instantiations/lean_decode_bf16_float8_64.cu"),
    ("decode_float8_short",),
    ("decode_float8_short",),
)


def of_8_bits(name: str, file: str, old: str, new: str, target: Target = INT8) -> Mutation:
    return Mutation(name, f"cuda/decode/{file}", old, new, target=target)


OF_8_BITS = [
    of_8_bits(
        "the scales of keys are dropped",
        "softmax.cuh",
        "if (params_.decode.k_scale != nullptr) scale_columns(s, scales);",
        "if (params_.decode.k_scale == nullptr) scale_columns(s, scales);",
    ),
    of_8_bits(
        "the scales of values are dropped",
        "softmax.cuh",
        "    scale_columns(s, scales);\n    hide(",
        "    hide(",
    ),
    of_8_bits(
        "NaN of a scale reaches rows that do not see it",
        "softmax.cuh",
        "    hide(s, first_key, 0.0f);\n",
        "",
    ),
    of_8_bits(
        "the scales of keys multiply the weights",
        "lean_decode.cuh",
        "ring.value_scales() + key",
        "ring.key_scales() + key",
    ),
    of_8_bits(
        "scales are those of the first step of a tile",
        "lean_decode.cuh",
        "ring.key_scales() + key",
        "ring.key_scales() + groups.key * Config::kGroupKeys",
    ),
    of_8_bits(
        "scales are those of the keys after",
        "softmax.cuh",
        "scales + 8 * n + threadIdx.x % 4 * 2",
        "scales + 8 * n + (threadIdx.x + 1) % 4 * 2",
    ),
    of_8_bits(
        "scales are fetched one key further",
        "loader.cuh",
        "key_of_lane(i) * stride[2];",
        "(key_of_lane(i) + 1) * stride[2];",
    ),
    of_8_bits(
        "scales of a page are taken for those of another",
        "loader.cuh",
        "paged() ? places.value[i] :",
        "paged() ? places.value[i] % stride[0] :",
    ),
    of_8_bits(
        "the scales of keys travel with the values",
        "loader.cuh",
        "    if constexpr (Config::kHasScales) {\n"
        "      request_scales(tile + Config::kKeyScales, p.k_scale, p.k_scale_stride);\n"
        "    }\n"
        "    cp_async_commit_group();\n",
        "    cp_async_commit_group();\n"
        "    if constexpr (Config::kHasScales) {\n"
        "      request_scales(tile + Config::kKeyScales, p.k_scale, p.k_scale_stride);\n"
        "    }\n",
    ),
    of_8_bits(
        "a stage's scales lie in the next stage",
        "tile_config.cuh",
        "kStageBytes = kValueScales + kScaleBytes;",
        "kStageBytes = kValueScales;",
    ),
    of_8_bits(
        "columns of keys are swapped",
        "tile_mma_8_bits.cuh",
        "q[matrix % 2], pairs[0], pairs[1]);",
        "q[matrix % 2], pairs[1], pairs[0]);",
    ),
    of_8_bits(
        "queries are in the order of 16 bits",
        "tile_mma_8_bits.cuh",
        "q[half] = (columns.low & 0xffff) | columns.high << 16;",
        "q[half] = columns.low;",
    ),
    of_8_bits(
        "columns of values are swapped",
        "tile_mma_8_bits.cuh",
        "a[term], low[odd], high[odd]);",
        "a[term], low[1 - odd], high[1 - odd]);",
    ),
    of_8_bits(
        "columns of o are in the order of 16 bits",
        "tile_mma_8_bits.cuh",
        "n / 2 * 16 + threadIdx.x % 4 * 4 + c % 2 * 2 + n % 2;",
        "n * 8 + threadIdx.x % 4 * 2 + c % 2;",
    ),
    of_8_bits("bytes have no sign", "widen.cuh", "(bytes & both(0x80)) | ", ""),
    of_8_bits("float8 has no sign", "widen.cuh", " | (upper & kSign);", ";", FLOAT8),
    of_8_bits(
        "the NaN of float8 is a number",
        "widen.cuh",
        "return fma_pairs<Element>(beyond, 0, number);",
        "return number;",
        FLOAT8,
    ),
    of_8_bits(
        "the largest numbers of float8 are NaN",
        "widen.cuh",
        "kIsBFloat16 ? 0x7b10",
        "kIsBFloat16 ? 0x7f00",
        FLOAT8,
    ),
]
