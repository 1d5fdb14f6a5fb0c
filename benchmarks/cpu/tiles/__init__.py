# SPDX-License-Identifier: BSD-3-Clause
"""lean_decode of the CPU with other tiles: torch.ops.tree_attention_tiles.keys_32 to keys_1024."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

TILES = (32, 64, 128, 256, 1024)  # keys
OWN = 64  # of the extension
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
BUILD = ROOT / "build" / "tiles" / f"torch-{torch.__version__}"
# What the operators need of the product beside its headers and csrc/cpu/decode.cpp.
PRODUCT_SOURCES = (
    "csrc/memory_overlap.cpp",
    *(f"csrc/{name}.cpp" for name in ("decode_args", "merge_args", "range_parts")),
    *(f"csrc/cpu/{name}.cpp" for name in ("instruction_set", "merge", "kernel/merge_rows")),
    *(f"csrc/cpu/kernel/decode_{name}.cpp" for name in ("amx", "avx2", "avx512", "portable")),
)


@functools.cache
def load() -> None:
    """Registers the operators, compiled from what has changed: two minutes of one core at first."""
    BUILD.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "tree_attention_tiles",
        [str(FOLDER / "tiles.cpp"), *(str(ROOT / name) for name in PRODUCT_SOURCES)],
        build_directory=str(BUILD),
        extra_include_paths=[str(ROOT / "csrc")],
        # As setup.py, or the times would be those of other code.
        extra_cflags=[
            *("-O3", "-g1", "-std=c++20", "-fopenmp", "-ffp-contract=off"),
            *("-fvisibility=hidden", "-fno-wrapv"),
        ],
        is_python_module=False,
    )


def operator(tile: int) -> Any:
    """lean_decode with tiles of so many keys; for 0 its own. These are not the extension's, whose
    code would be out of the cache where it runs once in a round and all others share theirs."""
    return getattr(torch.ops.tree_attention_tiles, f"keys_{tile or OWN}")
