# SPDX-License-Identifier: BSD-3-Clause
"""Sparse attention as ranges of keys and as lists of pages, beside all keys and beside a mask.

python benchmarks/sparse.py --out DIR
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.accuracy import Float64Check
from benchmarks.harness.measure import (
    InputArena,
    Load,
    load_warnings,
    pin_threads,
    time_alternating,
)
from benchmarks.harness.program import add_quick, finish, parser_of, progress_bar, shown
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from tree_attention import lean_decode
from tree_attention.patterns import dilated, first, page_lists, random_blocks, window

OURS, LISTED, LISTING = "ours", "page list", "making the list"
ALL, MASKED = "all keys", "SDPA, mask"
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
PAGE_SIZE = 64

# Ranges of keys of slots [batch, 1].
PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "first 4, window 2044": lambda x: torch.cat([first(x, 4), window(x, 2044)], dim=2),
    "window 4096": lambda x: window(x, 4096),
}
# Ranges of the pages in which these slots are.
PATTERNS_OF_PAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "BigBird: first 64, window 192, 60 random blocks of 64": lambda x: torch.cat(
        [first(x, 1), window(x, 3), random_blocks(x, 60, block=1, seed=0)], dim=2
    ),
    "every eighth block of 64": lambda x: dilated(x, max(1, int(x.max()) // 8), dilation=8),
}


@dataclass(frozen=True)
class SparseCase:
    pattern: str
    lengths: tuple[int, ...] = (65536,)

    @property
    def name(self) -> str:
        return f"B={len(self.lengths)} {self.lengths[0]} {self.pattern}"

    @property
    def pages(self) -> int:
        """The number of pages of the longest sequence."""
        return -(-max(self.lengths) // PAGE_SIZE)

    @property
    def arena_bytes(self) -> int:
        """The bytes that the keys and values of all sets take, and their pages."""
        pages = 4 * HEADS_KV * HEAD_DIM * len(self.lengths) * self.pages * PAGE_SIZE
        return 2 * pages * self.num_sets

    @property
    def num_sets(self) -> int:
        return InputArena.num_sets(4 * HEADS_KV * HEAD_DIM * sum(self.lengths))


ALL_PATTERNS = (*PATTERNS, *PATTERNS_OF_PAGES)
STANDARD = tuple(
    SparseCase(pattern, lengths) for lengths in ((65536,), (16384,) * 4) for pattern in ALL_PATTERNS
)
QUICK = tuple(SparseCase(pattern, (700,) * 2) for pattern in ALL_PATTERNS)


def run_case(case: SparseCase, arena: InputArena, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    batch, seqlen_k = len(case.lengths), max(case.lengths)
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, generator=generator).bfloat16()
    shape = (2, batch, HEADS_KV, seqlen_k, HEAD_DIM)
    values = torch.randn(shape, generator=generator).bfloat16()
    sets = [arena.view(i, shape, values.dtype).copy_(values).unbind() for i in range(case.num_sets)]
    slots = torch.tensor([[length - 1] for length in case.lengths])
    listed: dict[str, Callable[[int], Any]] = {}
    if case.pattern in PATTERNS:
        ranges = PATTERNS[case.pattern](slots)
    else:
        pattern = PATTERNS_OF_PAGES[case.pattern]
        ranges = (pattern(slots // PAGE_SIZE) * PAGE_SIZE).clamp(max=slots.max() + 1).int()
        table = torch.randperm(batch * case.pages, generator=generator).view(batch, -1).int()
        pages = [paged(values, table, arena, case.num_sets + i) for i in range(case.num_sets)]

        def listing() -> tuple[Tensor, Tensor]:
            return page_lists(pattern(slots // PAGE_SIZE), slots + 1, table, PAGE_SIZE)

        seen, end = listing()
        listed = {
            LISTED: lambda i: lean_decode(q, *pages[i], end, page_table=seen),
            LISTING: lambda i: listing(),
        }
    j = torch.arange(seqlen_k)
    mask = ((ranges[..., :1] <= j) & (j < ranges[..., 1:])).any(2)[:, None]  # [batch, 1, 1, keys]
    functions: dict[str, Callable[[int], Any]] = {
        OURS: lambda i: lean_decode(q, sets[i][0], sets[i][1], ranges),
        **listed,
        ALL: lambda i: lean_decode(q, sets[i][0], sets[i][1]),
        MASKED: lambda i: F.scaled_dot_product_attention(
            q, sets[i][0], sets[i][1], attn_mask=mask, enable_gqa=True
        ),
    }
    with Load() as load:
        samples = time_alternating(functions, num_sets=case.num_sets, seconds=seconds)
    check = Float64Check(q, sets[0][0], sets[0][1], ranges)
    accuracies = {
        name: check.accuracy(*samples[name].result) for name in (OURS, LISTED) if name in samples
    }
    return {
        "name": case.name,
        "case": asdict(case),
        "num_ranges": ranges.shape[2],
        "keys_share": mask.float().mean().item(),
        "times": {name: sample.to_json() for name, sample in samples.items()},
        "ratios": {
            name: samples[name].median / samples[OURS].median
            for name in (LISTED, ALL, MASKED)
            if name in samples
        },
        "other_load": load.others,
        "accuracy": {name: asdict(accuracy) for name, accuracy in accuracies.items()},
        "wrong": not all(accuracy.right for accuracy in accuracies.values()),
    }


def paged(values: Tensor, table: Tensor, arena: InputArena, index: int) -> tuple[Tensor, Tensor]:
    """Keys and values of `values` on the pages of a table, `[num_pages, heads, page_size, dim]`."""
    _, _, heads, seqlen_k, dim = values.shape
    pages = arena.view(index, (2, table.numel(), heads, PAGE_SIZE, dim), values.dtype)
    padded = F.pad(values, (0, 0, 0, table.shape[1] * PAGE_SIZE - seqlen_k))
    pages[:, table] = padded.unflatten(3, (-1, PAGE_SIZE)).transpose(2, 3)
    return pages[0], pages[1]


def measure(cases: Sequence[SparseCase], seconds: float) -> Report:
    cpus = pin_threads()
    arena = InputArena(max(case.arena_bytes for case in cases))
    with torch.inference_mode(), progress_bar(True) as progress:
        rows = [run_case(case, arena, seconds) for case in shown(progress, cases)]
    return Report(
        name="sparse",
        title="Sparse attention as ranges of keys",
        notes=NOTES,
        environment=environment(**{"pinned to CPUs": cpus or "not pinned"}),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        warnings=load_warnings([row["other_load"] for row in rows]),
    )


def _microseconds(row: dict[str, Any], name: str) -> str:
    return f"{row['times'][name]['median_us']:.0f}" if name in row["times"] else "-"


NOTES = (
    f"A new token, bf16, {HEADS}/{HEADS_KV} heads of {HEAD_DIM}, medians of alternating runs "
    "through Python. keys: the share of the keys that the token sees. Page list: where the pattern "
    f"consists of whole pages of {PAGE_SIZE}, one range of a page table that names these alone. "
    "List: what making that takes, once for all layers of a step. All keys: lean_decode without "
    "ranges. SDPA, mask: scaled_dot_product_attention with the same keys as a mask.",
    "error is relative to the row's largest magnitude, against float64; more than twice that of "
    "plain PyTorch plus one rounding is WRONG.",
)

COLUMNS: Columns = {
    "case": lambda row: row["name"],
    "ranges": lambda row: str(row["num_ranges"]),
    "keys": lambda row: f"{100 * row['keys_share']:.1f} %",
    "ours us": lambda row: f"{row['times'][OURS]['median_us']:.0f}",
    "page list us": lambda row: _microseconds(row, LISTED),
    "list us": lambda row: _microseconds(row, LISTING),
    "all keys us": lambda row: f"{row['times'][ALL]['median_us']:.0f}",
    "all /ours": lambda row: f"{row['ratios'][ALL]:.1f}",
    "SDPA, mask us": lambda row: f"{row['times'][MASKED]['median_us']:.0f}",
    "SDPA /ours": lambda row: f"{row['ratios'][MASKED]:.1f}",
    "error": lambda row: f"{max(x['o_error'] for x in row['accuracy'].values()):.1e}",
    "right": verdict,
}


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "sparse")
    add_quick(parser, 2.0)
    parsed = parser.parse_args(arguments)
    return finish(measure(QUICK if parsed.quick else STANDARD, parsed.seconds), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
