# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the kernels for keys and values of 8 bits."""

from emulator_build import INSTANCES_FOLDER
from mutations import Mutation, Target

INT8 = Target(INSTANCES_FOLDER / "lean_decode_bf16_int8_64.cu", ("decode_int8_short",))
FLOAT8 = Target(INSTANCES_FOLDER / "lean_decode_bf16_float8_64.cu", ("decode_float8_short",))


def of_8_bits(name: str, file: str, old: str, new: str, target: Target = INT8) -> Mutation:
    return Mutation(name, f"cuda/decode/{file}", old, new, target=target)


OF_8_BITS = [
    of_8_bits("the scales of keys are dropped", "lean_decode.cuh", "of_keys.multiply(s);", ""),
    of_8_bits("the scales of values are dropped", "lean_decode.cuh", "of_values.multiply(s);", ""),
    of_8_bits(
        "NaN of a scale reaches rows that do not see it",
        "lean_decode.cuh",
        "if (hides) row_scores.hide(s, first_key, 0.0f);",
        "",
    ),
    of_8_bits(
        "weights are hidden where all keys are seen",
        "softmax.cuh",
        "    return hides;",
        "    return !hides;",
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
        "scales.cuh",
        "Fragments::load(scales + ",
        "Fragments::load(scales + 1 + ",
    ),
    of_8_bits("products are too large for float16", "softmax.cuh", "> 0x1p15f", "> 0x1p19f"),
    of_8_bits("negative scales have no magnitude", "softmax.cuh", "fabsf(product)", "product"),
    of_8_bits(
        "o keeps its units where those of products change",
        "softmax.cuh",
        "factor[i] = ex2(least - shift[i]);",
        "factor[i] = 1.0f;",
    ),
    of_8_bits(
        "units are relative to the maximum before",
        "softmax.cuh",
        "shift[i] += kept;",
        "",
    ),
    of_8_bits(
        "key groups are taken to have o in the same units",
        "combine_warps.cuh",
        "kLog2E - part.shift[row];",
        "kLog2E;",
    ),
    of_8_bits(
        "queries are too large for float16",
        "queries_as_float16.cuh",
        "(exponent - 14) << 23",
        "(exponent - 24) << 23",
    ),
    of_8_bits(
        "queries are in other units than scores",
        "queries_as_float16.cuh",
        "(254u << 23)",
        "(255u << 23)",
    ),
    of_8_bits(
        "the unit of a row is that of a part of its columns",
        "queries_as_float16.cuh",
        "combine_lanes<1, 4>(largest,",
        "combine_lanes<1, 2>(largest,",
    ),
    of_8_bits(
        "scales are fetched one key further",
        "loader.cuh",
        "places.value[i] : key * stride[2];",
        "places.value[i] : (key + 1) * stride[2];",
    ),
    of_8_bits(
        "scales of a page are taken for those of another",
        "loader.cuh",
        "paged() ? places.value[i] :",
        "paged() ? places.value[i] % stride[0] :",
    ),
    of_8_bits(
        "the scales of values travel with the values",
        "loader.cuh",
        "      request_scales(tile + Config::kValueScales, p.v_scale, p.v_scale_stride);\n"
        "    }\n"
        "    cp_async_commit_group();\n",
        "    }\n"
        "    cp_async_commit_group();\n"
        "    request_scales(tile + Config::kValueScales, p.v_scale, p.v_scale_stride);\n",
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
        "halves of queries are swapped",
        "tile_mma_8_bits.cuh",
        "q[half] = Queries::to_float16(columns.low,",
        "q[half] = Queries::to_float16(columns.high,",
    ),
    of_8_bits(
        "columns of values are swapped",
        "tile_mma_8_bits.cuh",
        "a, low[odd], high[odd]);",
        "a, low[1 - odd], high[1 - odd]);",
    ),
    of_8_bits(
        "columns of o are in the order of 16 bits",
        "tile_mma_8_bits.cuh",
        "return i / 2 * 16 + threadIdx.x % 4 * 4 + i % 2 * 2;",
        "return 8 * i + threadIdx.x % 4 * 2;",
    ),
    of_8_bits("bytes have no sign", "widen.cuh", "bytes ^ 0x80808080", "bytes"),
    of_8_bits("bytes are one too much", "widen.cuh", "both(0xe480)", "both(0xe47f)"),
    of_8_bits("bytes are in another order", "widen.cuh", "pair<0, 1>(bytes)", "pair<0, 2>(bytes)"),
    of_8_bits("float8 has no sign", "widen.cuh", " | (upper & kSign);", ";", FLOAT8),
    of_8_bits(
        "the NaN of float8 is a number",
        "widen.cuh",
        "return fma_f16x2(beyond, 0, number);",
        "return number;",
        FLOAT8,
    ),
    of_8_bits(
        "the largest numbers of float8 are NaN", "widen.cuh", "both(0x5860)", "both(0x7bff)", FLOAT8
    ),
]
