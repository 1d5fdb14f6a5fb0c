# SPDX-License-Identifier: BSD-3-Clause
"""Memory of a decoding step beside the shard, tree against rings, as Figure 4 of the Tree Attention
paper.

    python -m lab.papers.memory --out DIR
    python -m lab.papers.memory --heads 16 16 --contexts 64000 --worlds 2 4    # the paper's

Starts its ranks by torchrun on this machine. Linux only: it reads the peak of the resident memory.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.machine import available_bytes
from benchmarks.harness.measure import peak_memory_of
from benchmarks.harness.program import add_device, check_device, finish, parser_of
from benchmarks.harness.ranks import CPU, Ranks, device_of, run_rank, start_ranks
from benchmarks.harness.report import Column, Report, columns_of, environment
from lab.emulation.fake_attention import (
    DTYPE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_HEADS_KV,
)
from lab.papers.tree import paper_elements
from lab.simulation import RING, RING_PASS_Q, Problem, step_bytes
from tree_attention import ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.exchange import Communicator, StrategyName, Topology

# Two that are canonical, and the paper's own.
STRATEGIES: tuple[StrategyName, ...] = ("all_gather", "two_phase", "three_allreduce")
PUBLISHED = STRATEGIES[-1]
METHODS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    **{name: partial(tree_decode, strategy=name) for name in STRATEGIES},
    RING: ring_decode,
    RING_PASS_Q: ring_pass_q_decode,
}
WORLDS = (2, 3, 4)
CONTEXTS = tuple(1 << exponent for exponent in range(13, 19))  # keys per rank
PROCESS_BYTES = 400 << 20
TIMEOUT = 300.0
# Freed memory goes back to the system at once, so that the next method starts as the first did.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


Heads = tuple[int, int]  # query, key/value


def problem_of(keys: int, heads: Heads) -> Problem:
    return Problem(keys, 1, heads, HEAD_DIM, DTYPE)


def formula(method: str, world_size: int, problem: Problem) -> int:
    """Bytes of the buffers and outputs of a step; what libraries keep for themselves is not in
    it."""
    return step_bytes(method, problem, Topology((0,) * world_size))


def published_formula(method: str, problem: Problem) -> int | None:
    """Return what the Tree Attention paper says of its methods: Eq. 8, 9 without the shard, with
    its elements as those of the keys and values. None for other methods."""
    if method not in (PUBLISHED, RING):
        return None
    elements = paper_elements(problem)
    return DTYPE.itemsize * (elements.ring if method == RING else elements.tree)


class Method:
    """A method on a communicator with buffers of its own, which end with this object."""

    def __init__(self, method: str, num_heads_kv: int, device: torch.device = CPU) -> None:
        self._method = method
        self._comm = Communicator(timeout=TIMEOUT)
        self.result: tuple[Tensor, Tensor] | None = None
        # Tests how messages are delivered, of which other threads free a part, unseen.
        tiny = torch.zeros(1, num_heads_kv, 1, 8, dtype=DTYPE, device=device)
        METHODS[method](tiny, tiny, tiny, group=self._comm)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.result = None
        self.result = METHODS[self._method](q, k, v, group=self._comm)


def measure(
    contexts: Sequence[int], heads: Heads, ranks: Ranks, device: torch.device = CPU
) -> list[dict[str, Any]]:
    """On every rank: peaks of the first call of each method, of the rank that needs most."""
    rank, world_size = ranks.rank, ranks.size
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads[0], 1, HEAD_DIM, generator=generator).to(device, DTYPE)
    peaks_of = (on_device, on_device) if device.type == "cuda" else (allocated_by, resident_of)
    rows = []
    for keys in (8, *contexts):  # the first for what is loaded, connected and allocated only once
        shape = (1, heads[1], keys, HEAD_DIM)
        k, v = (torch.full(shape, x, dtype=DTYPE, device=device) for x in (0.0, rank + 1.0))
        row: dict[str, Any] = {"world_size": world_size, "keys": keys, "heads": heads}
        row["methods"] = {}
        for method in METHODS:
            peaks, right = [], True
            for peak_of in peaks_of:
                step = Method(method, heads[1], device)
                gc.collect()  # or the buffers of the one before would be freed in the middle
                peaks.append(peak_of(partial(step, q, k, v)))
                assert step.result is not None
                o, lse = step.result
                right &= is_right(o.cpu(), lse.cpu(), world_size, keys)
            allocated, resident, rights = zip(*ranks.gather((*peaks, right)), strict=True)
            row["methods"][method] = {
                "allocated": max(allocated),
                "resident": max(resident),
                "right": all(rights),
            }
        rows.append(row)
    return rows[1:]


def on_device(call: Callable[[], None]) -> int:
    """What torch's allocator had given out at most, of what came since the call began."""
    peak = peak_memory_of(call, "cuda")
    assert peak is not None
    return peak


def allocated_by(call: Callable[[], None]) -> int:
    """The largest sum of tensors' bytes that are alive at once during a second call, of those that
    came since the first began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
        between = time.time_ns()
        call()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    totals = accumulate(num_bytes for _, num_bytes in changes)
    return max(
        total for (time_ns, _), total in zip(changes, totals, strict=True) if time_ns >= between
    )


def resident_of(call: Callable[[], None]) -> int:
    """The growth of the resident memory, from before a call to its peak in it."""
    peak = peak_memory_of(call)
    if peak is None:
        raise SystemExit("memory.py needs /proc/self/clear_refs, which only Linux has")
    return peak


def is_right(o: Tensor, lse: Tensor, world_size: int, keys: int) -> bool:
    """All scores are zero and the values of rank r are r + 1."""
    right = torch.allclose(o.float(), torch.tensor((world_size + 1) / 2), rtol=2**-8)
    return right and torch.allclose(lse, torch.tensor(math.log(world_size * keys)), rtol=1e-6)


def measured_by_ranks(
    world_size: int, contexts: Sequence[int], heads: Heads, device: str
) -> list[Any]:
    options = ["--contexts", *map(str, contexts), "--heads", *map(str, heads), "--device", device]
    program = [__file__, *options, "--ranks-json"]
    rows: list[Any] = start_ranks(world_size, program, **ALLOCATOR)
    return rows


def fitting(world_size: int, contexts: Sequence[int], heads: Heads, memory: int) -> list[int]:
    """The contexts for which the ranks have memory: their shards and what rings receive into."""
    shards = 1 + min(2, world_size - 1)
    return [
        keys
        for keys in contexts
        if world_size * (shards * problem_of(keys, heads).kv_bytes + PROCESS_BYTES) <= memory
    ]


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "memory")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="KEYS")
    parser.add_argument(
        "--heads",
        type=int,
        nargs=2,
        default=(NUM_HEADS, NUM_HEADS_KV),
        metavar=("QUERY", "KEY"),
        help="16 16 and 32 32 are the paper's hidden sizes 2048 and 4096",
    )
    add_device(parser)
    parser.add_argument("--ranks-json", type=Path, help=argparse.SUPPRESS)  # of its own ranks
    parsed = parser.parse_args(arguments)
    check_device(parser, parsed.device)
    if parsed.ranks_json is not None:
        run_rank(
            parsed.ranks_json,
            lambda ranks: measure(parsed.contexts, parsed.heads, ranks, device_of(parsed.device)),
            parsed.device,
        )
        return 0
    rows = []
    for world_size in parsed.worlds:
        contexts = fitting(world_size, parsed.contexts, parsed.heads, available_bytes())
        rows += measured_by_ranks(world_size, contexts, parsed.heads, parsed.device)
    return finish(report_of(rows), parsed.out, width=120)


NOTES = (
    "A row is named p ranks, n keys per rank: heads of 128, bf16, one sequence, one query token, "
    "over Gloo on the loopback interface. Bytes are beyond the shard and the query, of the rank "
    "that needs most.",
    "On a device, allocated and resident are both what torch's allocator had given out at most.",
    "allocated: the largest sum of tensors that are alive at once in a step, as torch's profiler "
    "saw them come and go: buffers that the communicator keeps, scratch and outputs. resident: by "
    "how much the process grew to its peak in the first step, in pages that no earlier one had "
    "left behind.",
    "formula: with M = 4 * 129 * query heads, the bytes of a state, all_gather has (p + 1) * M; "
    "two_phase 3 * M, a result of 2 bytes an element and a p-th of one; three_allreduce 2 * M, a "
    "maximum and a flag for each row; the ring that passes queries M and parts of a p-th of the "
    "heads; and each the outputs.",
    "This ring receives one shard while it reads and sends another: with three ranks or more it "
    "needs two shards beside its own, and one with two ranks.",
    "paper: Eq. 8 (ring) and Eq. 9 (tree, the three all-reduces) of Tree Attention without the "
    "shard, in the same dtype. Its ring has one shard beside its own.",
    "Every result is compared with the known one.",
)


def report_of(rows: Sequence[dict[str, Any]]) -> Report:
    named = []
    for row in rows:
        world_size, problem = row["world_size"], problem_of(row["keys"], row["heads"])
        methods = {
            name: {
                **method,
                "formula": formula(name, world_size, problem),
                "published": published_formula(name, problem),
            }
            for name, method in row["methods"].items()
        }
        wrong = not all(method["right"] for method in methods.values())
        named.append(
            {**row, "name": f"p={world_size} n={row['keys']}", "methods": methods, "wrong": wrong}
        )
    return Report(
        name="memory",
        title="Memory of a decoding step beside the shard",
        notes=NOTES,
        environment=environment(**{"query and key heads": rows[0]["heads"]}),
        rows=named,
        columns=columns(named),
    )


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    lines = [(row, name, method) for row in rows for name, method in row["methods"].items()]

    def times_tree(row: dict[str, Any], method: dict[str, Any]) -> str:
        return f"{method['allocated'] / row['methods'][STRATEGIES[0]]['allocated']:,.1f}"

    def published(method: dict[str, Any]) -> str:
        return "-" if method["published"] is None else f"{method['published']:,}"

    return columns_of(
        lines,
        {
            "case": lambda row, name, method: row["name"],
            "method": lambda row, name, method: name,
            "allocated bytes": lambda row, name, method: f"{method['allocated']:,}",
            "formula": lambda row, name, method: f"{method['formula']:,}",
            "paper's formula": lambda row, name, method: published(method),
            "resident bytes": lambda row, name, method: f"{method['resident']:,}",
            "x all_gather": lambda row, name, method: times_tree(row, method),
            "shard bytes": lambda row, name, method: (
                f"{problem_of(row['keys'], row['heads']).kv_bytes:,}"
            ),
            "right": lambda row, name, method: "yes" if method["right"] else "WRONG",
        },
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
