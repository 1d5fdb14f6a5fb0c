# SPDX-License-Identifier: BSD-3-Clause
"""Memory of a decoding step beside the shard, tree against rings, as Figure 4 of the Tree Attention
paper.

    python benchmarks/memory.py --out DIR

Starts its ranks by torchrun on this machine. Linux only: it reads the peak of the resident memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

if (
    __name__ == "__main__"
):  # started by its path: `benchmarks` is found from the root of the checkout
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.emulation.fake_attention import DTYPE, HEAD_DIM, NUM_HEADS, NUM_HEADS_KV
from benchmarks.emulation.model import shard_bytes
from benchmarks.harness.machine import available_bytes
from benchmarks.harness.measure import peak_memory_of
from benchmarks.harness.program import add_out, finish
from benchmarks.harness.report import Column, Report, environment
from benchmarks.simulation import RING, RING_PASS_Q, Problem
from benchmarks.simulation.memory import step_bytes
from tree_attention import ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.exchange import Communicator, Topology

TREE = "tree"
WAYS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    TREE: tree_decode,
    RING: ring_decode,
    RING_PASS_Q: ring_pass_q_decode,
}
WORLDS = (2, 3, 4)
CONTEXTS = tuple(1 << exponent for exponent in range(13, 19))  # keys per rank
PROCESS_BYTES = 400 << 20
TIMEOUT = 300.0
# Freed memory goes back to the system at once, so that the next way starts as the first did.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def formula(way: str, world_size: int, keys: int) -> int:
    """Bytes of the buffers and outputs of a step, the tree's with an all-gather; what libraries
    keep for themselves is not in it."""
    problem = Problem(keys, 1, (NUM_HEADS, NUM_HEADS_KV), HEAD_DIM, DTYPE)
    strategy = "all_gather" if way == TREE else way
    return step_bytes(strategy, problem, Topology((0,) * world_size))


class Step:
    """A way on a communicator with buffers of its own, which end with this object."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._comm = Communicator(timeout=TIMEOUT)
        self.result: tuple[Tensor, Tensor] | None = None
        # Tests how messages are delivered, of which other threads free a part, unseen.
        tiny = torch.zeros(1, NUM_HEADS_KV, 1, 8, dtype=DTYPE)
        WAYS[way](tiny, tiny, tiny, group=self._comm)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.result = None
        self.result = WAYS[self._way](q, k, v, group=self._comm)


def measure(contexts: Sequence[int]) -> list[dict[str, Any]]:
    """On every rank: peaks of the first call of each way, of the rank that needs most."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    q = torch.randn(1, NUM_HEADS, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    rows = []
    for keys in (8, *contexts):  # the first for what is loaded, connected and allocated only once
        shape = (1, NUM_HEADS_KV, keys, HEAD_DIM)
        k, v = torch.full(shape, 0.0, dtype=DTYPE), torch.full(shape, rank + 1.0, dtype=DTYPE)
        row: dict[str, Any] = {"world_size": world_size, "keys": keys, "ways": {}}
        for way in WAYS:
            peaks, right = [], True
            for peak_of in (allocated_by, resident_of):
                step = Step(way)
                peaks.append(peak_of(partial(step, q, k, v)))
                assert step.result is not None
                right &= is_right(*step.result, world_size, keys)
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, (*peaks, right))
            allocated, resident, rights = zip(*every, strict=True)
            row["ways"][way] = {
                "allocated": max(allocated),
                "resident": max(resident),
                "right": all(rights),
            }
        rows.append(row)
    return rows[1:]


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


def start_ranks(world_size: int, contexts: Sequence[int]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world_size), __file__]
        command += ["--ranks-json", str(file), "--contexts", *map(str, contexts)]
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **ALLOCATOR}
        subprocess.run(command, check=True, env=os.environ | variables)
        rows: list[dict[str, Any]] = json.loads(file.read_text())
        return rows


def fitting(world_size: int, contexts: Sequence[int], memory: int) -> list[int]:
    """The contexts for which the ranks have memory: their shards and what rings receive into."""
    shards = 1 + min(2, world_size - 1)
    return [
        keys
        for keys in contexts
        if world_size * (shards * shard_bytes(1, keys) + PROCESS_BYTES) <= memory
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="KEYS")
    add_out(parser, "memory")
    parser.add_argument("--ranks-json", type=Path, help=argparse.SUPPRESS)  # of its own ranks
    parsed = parser.parse_args(arguments)
    if parsed.ranks_json is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        with torch.inference_mode():
            rows = measure(parsed.contexts)
        if dist.get_rank() == 0:
            parsed.ranks_json.write_text(json.dumps(rows))
        dist.destroy_process_group()
        return 0
    rows = []
    for world_size in parsed.worlds:
        rows += start_ranks(world_size, fitting(world_size, parsed.contexts, available_bytes()))
    return finish(report_of(rows), parsed.out, width=120)


NOTES = (
    "A row is named p ranks, n keys per rank: 32 query and 8 key heads of 128, bf16, one sequence, "
    "one query token, over Gloo on the loopback interface. Bytes are beyond the shard and the "
    "query, of the rank that needs most.",
    "allocated: the largest sum of tensors that are alive at once in a step, as torch's profiler "
    "saw them come and go: buffers that the communicator keeps, scratch and outputs. resident: by "
    "how much the process grew to its peak in the first step, in pages that no earlier one had "
    "left behind.",
    "formula: with M = 4 * 32 * (128 + 1), the bytes of a state, the tree has (p + 1) * M and the "
    "outputs; the ring one shard more with two ranks and two shards more with others, of 4096 "
    "bytes per key; the ring that passes queries a state and parts of a p-th of the heads.",
    "Every result is compared with the known one.",
)


def report_of(rows: Sequence[dict[str, Any]]) -> Report:
    named = []
    for row in rows:
        world_size, keys = row["world_size"], row["keys"]
        ways = {
            name: {**way, "formula": formula(name, world_size, keys)}
            for name, way in row["ways"].items()
        }
        wrong = not all(way["right"] for way in ways.values())
        named.append({**row, "name": f"p={world_size} n={keys}", "ways": ways, "wrong": wrong})
    return Report(
        name="memory",
        title="Memory of a decoding step beside the shard",
        notes=NOTES,
        environment=environment(),
        rows=named,
        columns=columns(named),
        draw=draw,
    )


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    lines = [(row, name, way) for row in rows for name, way in row["ways"].items()]

    def times_tree(row: dict[str, Any], way: dict[str, Any]) -> str:
        return f"{way['allocated'] / row['ways'][TREE]['allocated']:,.1f}"

    return [
        Column("case", [row["name"] for row, _, _ in lines]),
        Column("way", [name for _, name, _ in lines]),
        Column("allocated bytes", [f"{way['allocated']:,}" for _, _, way in lines]),
        Column("formula", [f"{way['formula']:,}" for _, _, way in lines]),
        Column("resident bytes", [f"{way['resident']:,}" for _, _, way in lines]),
        Column("x tree", [times_tree(row, way) for row, _, way in lines]),
        Column("shard bytes", [f"{shard_bytes(1, row['keys']):,}" for row, _, _ in lines]),
        Column("right", ["yes" if way["right"] else "WRONG" for _, _, way in lines]),
    ]


def draw(report: Report, path: Path) -> None:
    """Peak by context, a panel for each world; the formula as a dotted line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    worlds = sorted({row["world_size"] for row in report.rows})
    figure, panels = pyplot.subplots(
        1, len(worlds), figsize=(4.5 * len(worlds), 4.5), sharey=True, squeeze=False
    )
    for axes, world_size in zip(panels[0], worlds, strict=True):
        rows = [row for row in report.rows if row["world_size"] == world_size]
        keys = [row["keys"] for row in rows]
        for i, name in enumerate(WAYS):
            peaks = [row["ways"][name]["allocated"] / 2**20 for row in rows]
            formulas = [row["ways"][name]["formula"] / 2**20 for row in rows]
            axes.plot(keys, peaks, "o", color=f"C{i}", label=name)
            axes.plot(keys, formulas, ":", color=f"C{i}")
        axes.set(yscale="log", xlabel="keys per rank", title=f"{world_size} ranks")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("MiB beside the shard (dotted: formula)")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(report.title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
