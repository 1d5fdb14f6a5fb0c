# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the exchange between warps that split head_dim."""

from emulator_build import INSTANCES_FOLDER
from mutations import Mutation, Target

COLUMNS = Target(INSTANCES_FOLDER / "lean_decode_bf16_int8_256.cu", ("decode_columns_short",))


def of_columns(name: str, file: str, old: str, new: str) -> Mutation:
    return Mutation(name, f"cuda/decode/{file}", old, new, target=COLUMNS)


OF_COLUMNS = [
    of_columns(
        "products of the other columns are left out",
        "column_groups.cuh",
        "warp ^ Config::kRowGroups",
        "warp",
    ),
    of_columns(
        "products of the other columns are not waited for",
        "column_groups.cuh",
        "  sync_key_group<Config>();\n",
        "",
    ),
    of_columns(
        "products are stored into global memory",
        "column_groups.cuh",
        "store_shared(place",
        "store_global_float4(place",
    ),
    of_columns(
        "products are overwritten by those of the next step",
        "column_groups.cuh",
        "step % 2 * kBufferBytes",
        "0 * step",
    ),
    of_columns(
        "queries are those of the first columns",
        "lean_decode.cuh",
        "loader.queries(number) + first_product * sizeof(Element)",
        "loader.queries(number)",
    ),
    of_columns(
        "values are those of the first columns",
        "lean_decode.cuh",
        "ring.values() + first_column * sizeof(Cached)",
        "ring.values()",
    ),
    of_columns(
        "o of the other columns takes the place of the first",
        "combine_warps.cuh",
        "groups.column * Config::kWarpColumns + own - begin",
        "own - begin",
    ),
]
