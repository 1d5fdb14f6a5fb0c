# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in how blocks of rows that have their keys in common read them."""

from emulator_build import INSTANCES_FOLDER
from mutations import Mutation, Target

ROW_BLOCKS = Target(INSTANCES_FOLDER / "lean_decode_bf16_64.cu", ("decode_row_blocks",))

OF_ROW_BLOCKS = [
    Mutation(
        "the blocks of rows of a sequence are neighbours on the line",
        "cuda/decode/units.cuh",
        "    const int row_block = params_.batch.quotient(unit);\n"
        "    const int batch = unit - row_block * params_.batch.divisor;\n",
        "    const int batch = unit / params_.row_blocks;\n"
        "    const int row_block = unit % params_.row_blocks;\n",
        target=ROW_BLOCKS,
    ),
]
