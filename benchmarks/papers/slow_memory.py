# SPDX-License-Identifier: BSD-3-Clause
"""The slow-memory traffic of FlashAttention, counted, beside Theta(N^2 d^2 / M).

python -m benchmarks.papers.slow_memory --out DIR
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from tree_attention.reference import attention
from tree_attention.reference.papers.flash import (
    SlowMemory,
    flash_attention,
    flash_attention_2,
    flash_block_sizes,
    flash_traffic,
    standard_attention,
)

from ..harness.program import finish, parser_of
from ..harness.report import Columns, Report, columns_of, environment, verdict

# N queries and keys, head_dim d, fast memory M in elements, d <= M <= N d. The last three have the
# M of 192 KB of a processor in 2 bytes, of which line 1 makes blocks of 384 and 192 keys.
SHAPES = (
    (256, 16, 256),
    (256, 64, 1024),
    (512, 32, 4096),
    (1024, 64, 4096),
    (1024, 64, 16384),
    (2048, 64, 98304),
    (2048, 128, 98304),
    (4096, 64, 98304),
)


def row_of(seqlen: int, head_dim: int, fast_memory: int) -> dict[str, Any]:
    q, k, v = torch.randn(3, 1, 1, seqlen, head_dim, dtype=torch.float64)
    truth, _ = attention(q, k, v)
    block_q, block_k = flash_block_sizes(fast_memory, head_dim)
    counted = {}
    wrong = False
    for name, algorithm, options in (
        ("standard", standard_attention, {}),
        ("flash", flash_attention, {"fast_memory": fast_memory}),
        ("flash_2", flash_attention_2, {"block_q": block_q, "block_k": block_k}),
    ):
        memory = SlowMemory()
        o, _ = algorithm(q, k, v, memory=memory, **options)
        wrong |= not (o - truth).abs().max() < 1e-12
        counted[name] = memory.traffic
    formula = flash_traffic(seqlen, head_dim, fast_memory)
    return {
        "name": f"N {seqlen}, d {head_dim}, M {fast_memory}",
        "theta": seqlen**2 * head_dim**2 / fast_memory,
        "formula": formula,
        "wrong": wrong or counted["flash"] != formula,
        **counted,
    }


COLUMNS: Columns = {
    "shape": lambda row: row["name"],
    "N2d2/M": lambda row: f"{row['theta']:,.0f}",
    "FlashAttention counted": lambda row: f"{row['flash']:,}",
    "its formula": lambda row: f"{row['formula']:,}",
    "/ N2d2/M": lambda row: f"{row['flash'] / row['theta']:.2f}",
    "FlashAttention-2": lambda row: f"{row['flash_2']:,}",
    "standard": lambda row: f"{row['standard']:,}",
    "standard /FlashAttention": lambda row: f"{row['standard'] / row['flash']:.2f}",
    "right": verdict,
}


def run(shapes: Sequence[tuple[int, int, int]]) -> Report:
    torch.manual_seed(0)
    rows = [row_of(*shape) for shape in shapes]
    return Report(
        "slow_memory",
        "Elements that pass between slow and fast memory, counted while the algorithms run",
        [
            "FlashAttention's Algorithm 1 reads and writes O for every block of M / 4 d keys: 12 "
            "N^2 d^2 / M, and l and m, of which each is an element per row.",
            "FlashAttention-2 reads Q and writes O once, and K and V for every block of queries. "
            "Its paper leaves the blocks open; here they are those of Algorithm 1, whose line 1 "
            "allows d queries at most, so with much fast memory it moves more.",
            "Standard attention is counted as if each of its three steps loaded its matrices once.",
        ],
        environment(),
        rows,
        columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "slow_memory")
    parser.add_argument("--quick", action="store_true", help="the three smallest shapes")
    parsed = parser.parse_args(arguments)
    return finish(run(SHAPES[:3] if parsed.quick else SHAPES), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
