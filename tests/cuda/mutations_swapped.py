# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the tiles of 8 rows, whose operands are swapped, and in which rows and keys scores
belong to."""

from mutations import DECODE, Mutation, Target
from mutations_8_bits import INT8


def of_swapped(name: str, file: str, old: str, new: str, target: Target = DECODE) -> Mutation:
    return Mutation(name, f"cuda/decode/{file}", old, new, target=target)


OF_SWAPPED = [
    of_swapped(
        "weights are not transposed",
        "tile_mma_swapped.cuh",
        "pairs = movmatrix_trans(pairs);",
        "pairs ^= 0;",
    ),
    of_swapped(
        "values of swapped products are not transposed",
        "tile_mma_swapped.cuh",
        "ldmatrix_x4_trans(",
        "ldmatrix_x4(",
    ),
    of_swapped(
        "columns of values are taken for keys",
        "tile_mma_swapped.cuh",
        "row = first_key + lane / 16 * 8 + lane % 8;",
        "row = first_key + lane % 16;",
    ),
    of_swapped(
        "halves of swapped queries are the same",
        "tile_mma_swapped.cuh",
        "2 * i + half);",
        "2 * i);",
    ),
    of_swapped(
        "columns of o are in the order of 8 bits",
        "tile_mma_swapped.cuh",
        "return 8 * i + threadIdx.x % 32 / 4;",
        "return i / 2 * 16 + threadIdx.x % 32 / 4 * 2 + i % 2;",
    ),
    of_swapped(
        "the maximum of 8 rows is that of half of the keys",
        "fragments.cuh",
        "combine_lanes<4, 32>",
        "combine_lanes<4, 16>",
    ),
    of_swapped(
        "the maximum of 8 rows is that of other rows, too",
        "fragments.cuh",
        "combine_lanes<4, 32>",
        "combine_lanes<2, 32>",
    ),
    of_swapped(
        "the second key of 8 rows is the next one",
        "fragments.cuh",
        "kKeyStep = 8;",
        "kKeyStep = 1;",
    ),
    of_swapped(
        "two rows of a thread have different turns",
        "fragments.cuh",
        "return row >> 1 & 3;",
        "return row & 3;",
    ),
    of_swapped(
        "units are those of the rows of queries",
        "tile_mma_swapped_8_bits.cuh",
        "query_unit_, 4 * (Fragments::first_row() + i)",
        "query_unit_, threadIdx.x % 32",
        INT8,
    ),
    of_swapped(
        "keys and columns of keys are swapped",
        "tile_mma_swapped_8_bits.cuh",
        "{low[0], high[0], low[1], high[1]}",
        "{low[0], low[1], high[0], high[1]}",
        INT8,
    ),
    of_swapped(
        "keys and columns of values are swapped",
        "tile_mma_swapped_8_bits.cuh",
        "{low[0], low[1], high[0], high[1]}",
        "{low[0], high[0], low[1], high[1]}",
        INT8,
    ),
    of_swapped(
        "even columns of o are the first ones",
        "tile_mma_swapped_8_bits.cuh",
        "return 16 * i + threadIdx.x % 32 / 4 * 2;",
        "return 16 * i + threadIdx.x % 32 / 4;",
        INT8,
    ),
]
