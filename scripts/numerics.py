# SPDX-License-Identifier: BSD-3-Clause
"""Measures errors from 1k to 1M keys and writes the table of docs/numerics.md, from which
`benchmarks/pictures.py` draws its figure.

For each length, score distribution and dtype the keys are dealt to 1, 2, 4, ..., 64 shards, each
shard runs `lean_decode`, and the partial states are merged as the ranks of `tree_decode` would.
The truth is float64; beside it stands plain PyTorch in the same dtype. Exits with 1 if any result
is outside its bound.

    python scripts/numerics.py            about 3 minutes, 4 GiB
    python scripts/numerics.py --quick    up to 16k keys, prints only
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness import regions
from tree_attention import _C, BlockCyclic, lean_decode, merge_states
from tree_attention.cli.information import cpu_name
from tree_attention.reference import attention
from tree_attention.reference import merge_states as merge_in_float64
from tree_attention.reference.accuracy import bound_of_o, row_error

DOCS = Path(__file__).parent.parent / "docs"
LENGTHS = [1 << n for n in range(10, 21, 2)]
WORLDS = [1, 2, 4, 8, 16, 32, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM = 32, 2, 64
NUM_WORKERS = 4  # fixed, so that the split of the keys does not depend on the machine
CHUNK = 1 << 16  # keys converted to float64 at a time

# Standard deviation of the scores. `flat`: all keys count, and o shrinks like 1 / sqrt(keys).
# `peaked`: a few keys take all the weight, and exp of most differences underflows.
SCORES = {"flat": 0.1, "normal": 1.0, "peaked": 20.0}


@dataclass
class Result:
    """The largest errors over all rows; those of o are relative to the largest of the row."""

    scores: str
    num_keys: int
    dtype: torch.dtype
    plain_o: float  # error of plain PyTorch in the same dtype
    plain_lse: float  # error of float32 PyTorch on the same inputs, in ulps of lse
    tree_o: dict[int, float]  # our error, by number of shards
    tree_lse: dict[int, float]  # our error in ulps of lse, by number of shards
    same_bits: bool  # whether merging nodes of 2, 4 and 8 shards first gives the bits of one merge

    @property
    def right(self) -> bool:
        o_bound = bound_of_o(self.plain_o, self.dtype)
        lse_bound = 2 * self.plain_lse + 4
        return (
            self.same_bits
            and all(error <= o_bound for error in self.tree_o.values())
            and all(error <= lse_bound for error in self.tree_lse.values())
        )


def measure(scores: str, num_keys: int, dtype: torch.dtype) -> Result:
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(1, NUM_HEADS_Q, 1, HEAD_DIM, generator=generator) * SCORES[scores]
    k, v = (torch.randn(1, NUM_HEADS_KV, num_keys, HEAD_DIM, generator=generator) for _ in range(2))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    o_true, lse_true = float64_attention(q, k, v)
    plain_o, _ = attention(q, k, v, dtype=dtype)
    _, plain_lse = attention(q.float(), k.float(), v.float(), dtype=torch.float32)

    tree_o, tree_lse, same_bits = {}, {}, True
    for world_size in WORLDS:
        layout = BlockCyclic(world_size)
        states = []
        for rank in range(world_size):
            slots = layout.local_slots(rank, 0, num_keys)
            shard = k[:, :, slots], v[:, :, slots]
            states.append(lean_decode(q, *shard, out_dtype=torch.float32, num_workers=NUM_WORKERS))
        o_parts, lse_parts = (torch.stack(parts) for parts in zip(*states, strict=True))
        o, lse = merge_states(o_parts, lse_parts, out_dtype=dtype)
        same_bits &= all(
            torch.equal(o, by_node[0]) and torch.equal(lse, by_node[1])
            for by_node in (merge_by_node(o_parts, lse_parts, size, dtype) for size in (2, 4, 8))
        )
        tree_o[world_size] = row_error(o, o_true)
        tree_lse[world_size] = ulps(lse, lse_true)
    return Result(
        scores, num_keys, dtype, row_error(plain_o, o_true), ulps(plain_lse, lse_true),
        tree_o, tree_lse, same_bits,
    )  # fmt: skip


def float64_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The reference over chunks of keys, merged in float64, without a copy of the whole cache."""
    states = [
        attention(q, k[:, :, i : i + CHUNK], v[:, :, i : i + CHUNK])
        for i in range(0, k.shape[2], CHUNK)
    ]
    o_parts, lse_parts = (torch.stack(parts) for parts in zip(*states, strict=True))
    return merge_in_float64(o_parts, lse_parts)


def merge_by_node(
    o_parts: Tensor, lse_parts: Tensor, node_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    nodes = [
        merge_states(o_parts[i : i + node_size], lse_parts[i : i + node_size])
        for i in range(0, len(o_parts), node_size)
    ]
    o_nodes, lse_nodes = (torch.stack(parts) for parts in zip(*nodes, strict=True))
    return merge_states(o_nodes, lse_nodes, out_dtype=dtype)


def ulps(lse: Tensor, truth: Tensor) -> float:
    """The largest error in float32 ulps of the true value, or of 1 where the value is smaller."""
    _, exponent = torch.frexp(truth.abs().clamp(min=1))
    ulp = torch.ldexp(torch.ones_like(truth), exponent - 24)
    return ((lse.double() - truth).abs() / ulp).max().item()


def table(results: list[Result]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = [
        "| scores | keys | "
        + " | ".join(f"{name}: plain | {name}: tree_attention" for name in names)
        + " | lse, ulps: plain | lse, ulps: tree_attention |",
        "| --- | ---: |" + " ---: |" * (2 * len(names) + 2),
    ]  # fmt: skip
    for scores in SCORES:
        for num_keys in sorted({result.num_keys for result in results}):
            cells = []
            row = [r for r in results if (r.scores, r.num_keys) == (scores, num_keys)]
            if not row:
                continue
            for result in row:
                worst = max(result.tree_o.values())
                cells += [f"{result.plain_o:.1e}", f"{worst:.1e}" + " WRONG" * (not result.right)]
            cells.append(f"{max(r.plain_lse for r in row):.1f}")
            cells.append(f"{max(max(r.tree_lse.values()) for r in row):.1f}")
            lines.append(f"| {scores} | {num_keys:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def provenance() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True, text=True, cwd=DOCS, check=True,
    ).stdout.strip()  # fmt: skip
    heads = f"{NUM_HEADS_Q} query heads on {NUM_HEADS_KV} key heads of {HEAD_DIM}"
    return (
        f"`python scripts/numerics.py`, commit {commit}; {cpu_name()}, "
        f"{_C.cpu_instruction_set()}, torch {torch.__version__}; {heads}, "
        f"`num_workers={NUM_WORKERS}`."
    )


def write_page(results: list[Result]) -> None:
    page = DOCS / "numerics.md"
    text = f"{provenance()}\n\n{table(results)}"
    page.write_text(regions.written(page.read_text(), "scripts/numerics.py", text))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 16k keys, write nothing")
    quick = parser.parse_args().quick
    lengths = [n for n in LENGTHS if not quick or n <= 1 << 14]
    cases = [(s, n, d) for n in lengths for s in SCORES for d in DTYPES]
    results, console = [], Console(stderr=True)
    with Progress(console=console) as progress, torch.no_grad():
        task = progress.add_task("measuring", total=sum(n for _, n, _ in cases))
        for scores, num_keys, dtype in cases:
            name = str(dtype).removeprefix("torch.")
            progress.update(task, description=f"{num_keys:>9,} keys, {scores}, {name}")
            results.append(measure(scores, num_keys, dtype))
            progress.advance(task, num_keys)
    print(table(results))
    if not quick:
        write_page(results)
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
