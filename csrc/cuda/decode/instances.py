# SPDX-License-Identifier: BSD-3-Clause
"""Writes a source file for each decode kernel that instances.cuh can choose, so that they compile
side by side: `python csrc/cuda/decode/instances.py FOLDER`."""

import os
import sys
from pathlib import Path

# In C++. Queries of 16 bits also meet keys and values of 8 bits.
QUERIES = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "float"}
CACHED = {"int8": "Int8", "float8": "Float8"}
HEAD_DIMS = (256, 128, 64)  # those that take longest first
LATENTS = 576  # of which the first 512 are the values

TEXT = """\
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/decode/lean_decode.cuh"

namespace tree_attention::cuda {{
template cudaError_t launch_instance<{query}, {head_dim}, {cached}>(const LaunchParams&,
                                                                    const Plan&, cudaStream_t);
template cudaError_t find_resident_blocks_of_instance<{query}, {head_dim}, {cached}>(const Plan&,
                                                                                     int*);
}}
"""

WGMMA_TEXT = """\
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/decode/lean_decode_wgmma.cuh"

namespace tree_attention::cuda {{
template cudaError_t launch_wgmma_instance<{query}, {head_dim}>(const WgmmaParams&, const Plan&,
                                                                cudaStream_t);
template cudaError_t find_resident_blocks_of_wgmma_instance<{query}, {head_dim}>(const Plan&, int*);
}}
"""


def wgmma_instances() -> dict[str, str]:
    """Return the same for the kernels for Hopper."""
    return {
        f"lean_decode_wgmma_{name}_{head_dim}": WGMMA_TEXT.format(
            query=QUERIES[name], head_dim=head_dim
        )
        for head_dim in (LATENTS, 128, 64)
        for name in ("bf16", "fp16")
    }


def instances() -> dict[str, str]:
    """Return the text of each file by its name without suffix."""
    texts = {}
    for name in ("bf16", "fp16"):
        query = QUERIES[name]
        texts[f"lean_decode_{name}_{LATENTS}"] = TEXT.format(
            query=query, head_dim=LATENTS, cached=query
        )
    for head_dim in HEAD_DIMS:
        for name, query in QUERIES.items():
            texts[f"lean_decode_{name}_{head_dim}"] = TEXT.format(
                query=query, head_dim=head_dim, cached=query
            )
            if name == "fp32":
                continue
            for cached_name, cached in CACHED.items():
                texts[f"lean_decode_{name}_{cached_name}_{head_dim}"] = TEXT.format(
                    query=query, head_dim=head_dim, cached=cached
                )
    return texts


def write_instances(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write the files into `folder`, and leave those that are right untouched: their time decides
    what is compiled again, and another process may be compiling them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.cu"
        if not path.exists() or path.read_text() != text:
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(text)
            new.replace(path)
        paths.append(path)
    return paths


if __name__ == "__main__":
    print(*write_instances(Path(sys.argv[1]), instances() | wgmma_instances()), sep="\n")
