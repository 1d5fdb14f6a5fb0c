# SPDX-License-Identifier: BSD-3-Clause
"""The published schedules over the inner loop of lean_decode, as operators of their own:
torch.ops.tree_attention_ablations.equal_splits (FlashDecoding) and .waiting_fixup (LeanAttention);
lean_decode with tiles of so many keys in a ring of so many stages, as .keys_128_stages_2; and
lean_decode that notes when it passes the places of stamps.h, as .stamped.

`python -m benchmarks.cuda.ablations` builds them, for the GPU that torch finds or for
TORCH_CUDA_ARCH_LIST; `load` takes what was built."""

from pathlib import Path
from typing import Any

import torch

NAME = "tree_attention_ablations"
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
BUILD = ROOT / "build" / "ablations" / f"torch-{torch.__version__}"
SOURCES = ("ablations.cu", "stamped.cu", "tiles.cu", "ops.cpp")
# (keys, stages). Of 128 columns there are 64 and 128 keys; four stages may not fit.
TILES = tuple((keys, stages) for keys in (64, 128, 256) for stages in (2, 3, 4))
# What the operators need of the product beside its headers.
PRODUCT_SOURCES = (
    "csrc/args/decode.cpp",
    "csrc/args/memory_overlap.cpp",
    "csrc/args/merge.cpp",
    "csrc/args/ranges.cpp",
    "csrc/cuda/checks.cpp",
    "csrc/cuda/decode/plan.cu",
    "csrc/cuda/decode/workspaces.cpp",
)


def build() -> None:
    """Compiles what has changed."""
    from torch.utils import cpp_extension  # which warns where there is no GPU

    BUILD.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        NAME,
        [
            *(str(FOLDER / name) for name in SOURCES),
            *(str(ROOT / name) for name in PRODUCT_SOURCES),
        ],
        build_directory=str(BUILD),
        extra_include_paths=[str(FOLDER), str(ROOT / "csrc")],
        # As setup.py: products and sums are fused only where the text says so.
        extra_cflags=["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"],
        extra_cuda_cflags=["-O3", "-std=c++20", "-fmad=false"],
        is_python_module=False,
        with_cuda=True,
    )


def load() -> bool:
    """Registers the operators; whether they are built."""
    library = BUILD / f"{NAME}.so"
    if library.exists():
        torch.ops.load_library(library)
    return library.exists()


def operator(tile: int, stages: int) -> Any:
    """lean_decode with tiles of so many keys; the extension's own for 0."""
    if tile == 0:
        return torch.ops.tree_attention.lean_decode
    return getattr(torch.ops.tree_attention_ablations, f"keys_{tile}_stages_{stages}")
