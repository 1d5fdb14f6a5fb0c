# SPDX-License-Identifier: BSD-3-Clause
"""Sparse attention as ranges of keys, beside all keys and beside PyTorch with a mask.

python benchmarks/sparse.py --out DIR
"""

from __future__ import annotations

import argparse
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

from benchmarks.harness.measure import (
    InputArena,
    Load,
    load_warnings,
    pin_threads,
    time_alternating,
)
from benchmarks.harness.program import add_out, finish, progress_bar
from benchmarks.harness.report import Report, columns_of, environment
from tree_attention import lean_decode
from tree_attention.patterns import dilated, first, random_blocks, window
from tree_attention.reference.accuracy import Float64Check

OURS, ALL, MASKED = "ours", "all keys", "SDPA, mask"
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128

# Of slots [batch, 1]: ranges of keys.
PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "first 4, window 2044": lambda x: torch.cat([first(x, 4), window(x, 2044)], dim=2),
    "window 4096": lambda x: window(x, 4096),
    "BigBird: first 64, window 192, 60 random blocks of 64": lambda x: torch.cat(
        [first(x, 64), window(x, 192), random_blocks(x, 60, block=64, seed=0)], dim=2
    ),
    "every eighth block of 64": lambda x: dilated(
        x, max(1, int(x.max()) // 512), dilation=512, block=64
    ),
}


@dataclass(frozen=True)
class SparseCase:
    pattern: str
    lengths: tuple[int, ...] = (65536,)

    @property
    def name(self) -> str:
        return f"B={len(self.lengths)} {self.lengths[0]} {self.pattern}"


STANDARD = tuple(
    SparseCase(pattern, lengths) for lengths in ((65536,), (16384,) * 4) for pattern in PATTERNS
)
QUICK = tuple(SparseCase(pattern, (700,) * 2) for pattern in PATTERNS)


def run_case(case: SparseCase, arena: InputArena, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    batch, seqlen_k = len(case.lengths), max(case.lengths)
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, generator=generator).bfloat16()
    shape = (2, batch, HEADS_KV, seqlen_k, HEAD_DIM)
    values = torch.randn(shape, generator=generator).bfloat16()
    num_sets = InputArena.num_sets(values.nbytes)
    sets = [arena.view(i, shape, values.dtype).copy_(values).unbind() for i in range(num_sets)]
    ranges = PATTERNS[case.pattern](torch.tensor([[length - 1] for length in case.lengths]))
    j = torch.arange(seqlen_k)
    mask = ((ranges[..., :1] <= j) & (j < ranges[..., 1:])).any(2)[:, None]  # [batch, 1, 1, keys]
    functions: dict[str, Callable[[int], Any]] = {
        OURS: lambda i: lean_decode(q, sets[i][0], sets[i][1], ranges),
        ALL: lambda i: lean_decode(q, sets[i][0], sets[i][1]),
        MASKED: lambda i: F.scaled_dot_product_attention(
            q, sets[i][0], sets[i][1], attn_mask=mask, enable_gqa=True
        ),
    }
    with Load() as load:
        samples = time_alternating(functions, num_sets=num_sets, seconds=seconds)
    accuracy = Float64Check(q, sets[0][0], sets[0][1], ranges).accuracy(*samples[OURS].result)
    return {
        "name": case.name,
        "case": asdict(case),
        "num_ranges": ranges.shape[2],
        "keys_share": mask.float().mean().item(),
        "times": {name: sample.to_json() for name, sample in samples.items()},
        "ratios": {name: samples[name].median / samples[OURS].median for name in (ALL, MASKED)},
        "other_load": load.others,
        "accuracy": asdict(accuracy),
        "wrong": not accuracy.right,
    }


def measure(cases: Sequence[SparseCase], seconds: float) -> Report:
    cpus = pin_threads()
    set_bytes = [4 * HEADS_KV * HEAD_DIM * sum(case.lengths) for case in cases]
    arena = InputArena(max(n * InputArena.num_sets(n) for n in set_bytes))
    rows = []
    with torch.inference_mode(), progress_bar(True) as progress:
        task = progress.add_task("sparse", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            rows.append(run_case(case, arena, seconds))
            progress.advance(task)
    return Report(
        name="sparse",
        title="Sparse attention as ranges of keys",
        notes=NOTES,
        environment=environment(**{"pinned to CPUs": cpus or "not pinned"}),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        warnings=load_warnings([row["other_load"] for row in rows]),
    )


NOTES = (
    f"A new token, bf16, {HEADS}/{HEADS_KV} heads of {HEAD_DIM}, medians of alternating runs "
    "through Python. keys: the share of the keys that the token sees. All keys: lean_decode "
    "without ranges. SDPA, mask: scaled_dot_product_attention with the same keys as a mask.",
    "error is relative to the row's largest magnitude, against float64; more than twice that of "
    "plain PyTorch plus one rounding is WRONG.",
)

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "case": lambda row: row["name"],
    "ranges": lambda row: str(row["num_ranges"]),
    "keys": lambda row: f"{100 * row['keys_share']:.1f} %",
    "ours us": lambda row: f"{row['times'][OURS]['median_us']:.0f}",
    "all keys us": lambda row: f"{row['times'][ALL]['median_us']:.0f}",
    "all /ours": lambda row: f"{row['ratios'][ALL]:.1f}",
    "SDPA, mask us": lambda row: f"{row['times'][MASKED]['median_us']:.0f}",
    "SDPA /ours": lambda row: f"{row['ratios'][MASKED]:.1f}",
    "error": lambda row: f"{row['accuracy']['o_error']:.1e}",
    "right": lambda row: "WRONG" if row["wrong"] else "yes",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few tiny cases, to try it")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="timed seconds per case (default 2)"
    )
    add_out(parser, "sparse")
    parsed = parser.parse_args(arguments)
    return finish(measure(QUICK if parsed.quick else STANDARD, parsed.seconds), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
