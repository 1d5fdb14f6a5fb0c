# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the kernels for latents, whose values are the first columns of their keys."""

from emulator_build import INSTANCES_FOLDER
from mutations import FILL, KEY_BARRIER, Mutation, Target

LATENTS = Target(INSTANCES_FOLDER / "lean_decode_bf16_576.cu", ("decode_latents_short",))


def of_latents(name: str, file: str, old: str, new: str) -> Mutation:
    return Mutation(name, f"cuda/decode/{file}", old, new, target=LATENTS)


OF_LATENTS = [
    of_latents(
        "the next tile is requested while values are read",
        "lean_decode.cuh",
        KEY_BARRIER + FILL,
        FILL,
    ),
    of_latents(
        "queries that stay in shared memory are overwritten by the next",
        "lean_decode.cuh",
        "Config::kFetchesNextOutput ? last_output : number",
        "last_output",
    ),
    of_latents(
        "products of a column group are added twice",
        "column_groups.cuh",
        "place(first + g * Config::kRowGroups, n)",
        "place(first + (g | 1) * Config::kRowGroups, n)",
    ),
    of_latents(
        "products of the other columns are not waited for in latents",
        "column_groups.cuh",
        "  sync_key_group<Config>();\n",
        "",
    ),
    of_latents(
        "products of two steps share memory",
        "column_groups.cuh",
        "step % 2 * kBufferBytes",
        "0 * step",
    ),
    of_latents(
        "all column groups multiply the same columns",
        "warp_tile.cuh",
        "return 2 * WarpGroups<Config>().column;",
        "return 0;",
    ),
    of_latents(
        "queries in shared memory are those of the first columns",
        "tile_mma.cuh",
        "QueryRows::offset(row, this->first_chunk() + lane / 16)",
        "QueryRows::offset(row, lane / 16)",
    ),
    of_latents(
        "values are copied as well",
        "loader.cuh",
        "if constexpr (!Config::kValuesInKeys) {",
        "if constexpr (true) {",
    ),
    of_latents(
        "values are behind the keys",
        "ring.cuh",
        "(Config::kValuesInKeys ? 0 : Config::kTileBytes)",
        "Config::kTileBytes",
    ),
    of_latents(
        "o of half of the rows overlaps that of the other half",
        "combine_warps.cuh",
        "row / kHalf * kHalfBytes",
        "row / kHalf * (kHalfBytes / 2)",
    ),
    of_latents(
        "values of the other columns are those of the first",
        "lean_decode.cuh",
        "ring.values() + first_column * sizeof(Cached)",
        "ring.values()",
    ),
]
