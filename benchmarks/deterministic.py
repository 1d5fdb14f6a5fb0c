# SPDX-License-Identifier: BSD-3-Clause
"""Cost of the same bits for every number of ranks: tree_decode with and without deterministic.

python benchmarks/deterministic.py
torchrun --nproc-per-node 2 benchmarks/deterministic.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.accuracy import Float64Check
from benchmarks.harness.measure import InputArena, decode_set, pin_threads, time_in_step
from benchmarks.harness.program import add_out, finish
from benchmarks.harness.ranks import Ranks, slowest_rank
from benchmarks.harness.report import Report, columns_of, environment
from tree_attention import BlockCyclic, tree_decode
from tree_attention.cli.world import joined_world
from tree_attention.exchange import Communicator
from tree_attention.reference.accuracy import digest

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128


def measure(length: int, sizes: Sequence[int], rounds: int, ranks: Ranks) -> list[dict[str, Any]]:
    """A row without deterministic and one for each of `sizes`, the same on every rank."""
    layout = BlockCyclic(ranks.size, max(sizes))
    generator = torch.Generator().manual_seed(0)
    q = 3.0 * torch.randn(1, HEADS, 1, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, 1, HEADS_KV, length, HEAD_DIM, generator=generator).bfloat16()
    q, own = q.bfloat16(), layout.local_slots(ranks.rank, 0, length)
    num_sets = InputArena.num_sets(k.nbytes + v.nbytes)
    sets = [(k[:, :, own], v[:, :, own]) for _ in range(num_sets)]
    functions: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {}
    for size in (0, *sizes):
        options: dict[str, Any] = {
            "deterministic": size,
            "key_layout": layout.key_layout(ranks.rank),
        }
        # One communicator for each: changing the call would compare signatures again.
        name = f"in blocks of {size}" if size else "without"
        functions[name] = partial(decode_set, tree_decode, q, sets, group=Communicator(), **options)
    samples = time_in_step(functions, num_sets=num_sets, rounds=rounds)
    check = Float64Check(q, k, v, None)
    rows: list[dict[str, Any]] = []
    for name, sample in samples.items():
        slowest = slowest_rank(ranks, sample)
        accuracy = check.accuracy(*sample.result)
        bits = ranks.gather(digest(sample.result))
        rows.append(
            {
                "name": name,
                "times": {name: slowest.to_json()},
                "milliseconds": 1e3 * slowest.median,
                "bits": bits[0],
                "accuracy": asdict(accuracy),
                "wrong": not accuracy.right or len(set(bits)) > 1,
            }
        )
    for row in rows:
        row["ratio"] = row["milliseconds"] / rows[0]["milliseconds"]
    return rows


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "deterministic": lambda row: row["name"],
    "ms": lambda row: f"{row['milliseconds']:.1f}",
    "this /without": lambda row: f"{row['ratio']:.2f}",
    "bits": lambda row: row["bits"][:12],
    "error": lambda row: f"{row['accuracy']['o_error']:.1e}",
    "right": lambda row: "WRONG" if row["wrong"] else "yes",
}


def report_of(rows: list[dict[str, Any]], length: int, ranks: Ranks, cpus: object) -> Report:
    note = (
        f"A new token over {length:,} keys, bf16, {HEADS}/{HEADS_KV} heads of {HEAD_DIM}, medians "
        "of alternating calls, of the slowest rank. bits: a digest of the result, which with "
        "deterministic is that of every number of ranks and threads."
    )
    return Report(
        name=f"deterministic_{ranks.size}",
        title=f"The same bits everywhere, over {ranks.size} rank{'s' * (ranks.size > 1)}",
        notes=[note],
        environment=environment(ranks=ranks.size, **{"pinned to CPUs": cpus}),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--length", type=int, default=131072, help="keys (default 131072)")
    parser.add_argument("--blocks", type=int, nargs="+", default=(4096, 1024))
    parser.add_argument("--rounds", type=int, default=60, help="calls of each (default 60)")
    add_out(parser, "deterministic_RANKS")
    parsed = parser.parse_args(arguments)
    with joined_world() as world, torch.inference_mode():
        ranks = Ranks()
        cpus = ranks.gather(pin_threads(first=world.local_rank * torch.get_num_threads()))
        rows = measure(parsed.length, parsed.blocks, parsed.rounds, ranks)
        report = report_of(rows, parsed.length, ranks, cpus)
        return finish(report, parsed.out) if world.root else int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
