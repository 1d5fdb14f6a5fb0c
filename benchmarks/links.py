# SPDX-License-Identifier: BSD-3-Clause
"""Seconds of messages and collectives by their size, as Figure 2 of the Tree Attention paper.

    torchrun --nproc-per-node 8 benchmarks/links.py --device cuda          # NCCL
    sudo .venv/bin/python -m lab.emulation --hosts 4 --link 1ms,1gbit --near 0.1ms,10gbit \\
        --per-node 2 -- .venv/bin/python benchmarks/links.py --largest 1048576

To each operation the line alpha + beta * bytes is fitted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.program import add_device, check_device, finish, parser_of
from benchmarks.harness.ranks import Ranks, joined_device, there_and_back
from benchmarks.harness.report import Report, columns_of, environment, verdict
from tree_attention.exchange import Communicator

SMALLEST, FACTOR = 1024, 4  # bytes, and from one size to the next
MIN_ROUNDS, MAX_ROUNDS = 3, 50


@dataclass(frozen=True)
class Operation:
    """Something that ranks do at once."""

    name: str
    call: Callable[[Tensor], Tensor]  # with this rank's number + 1; what it has afterwards
    expected: tuple[float, float]  # the first and the last element of that
    meet: Callable[[], Any]  # before it
    trips: int = 1  # in a call, one after the other


def operations(rank: int, nodes: Sequence[Any]) -> list[Operation]:
    world_size = len(nodes)
    found = []
    for name, is_near in (("inside a node", True), ("between nodes", False)):
        others = (r for r in range(1, world_size) if (nodes[r] == nodes[0]) == is_near)
        other = next(others, None)
        if other is not None:
            ours = 1.0 if rank in (0, other) else rank + 1.0
            call = partial(there_and_back, rank, other)
            # After a barrier one would wait for the other, of which it heard later.
            meet = partial(call, torch.empty(1))
            found.append(Operation(f"send/recv {name}", call, (ours, ours), meet, trips=2))
    total = world_size * (world_size + 1) / 2
    return [
        *found,
        Operation("all-reduce", _all_reduce, (total, total), dist.barrier),
        Operation("all-gather", _all_gather, (1.0, float(world_size)), dist.barrier),
    ]


def _all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _all_gather(x: Tensor) -> Tensor:
    result = x.new_empty(dist.get_world_size() * x.numel())
    dist.all_gather_into_tensor(result, x)
    return result


def measure(sizes: Sequence[int], seconds: float, device: torch.device, ranks: Ranks) -> list[Any]:
    """Rows of every operation and size, the same on all ranks."""
    comm = Communicator()
    comm.agree((("call", "links"),))  # which finds the nodes
    rows = []
    for operation in operations(ranks.rank, comm.topology.nodes):
        for num_bytes in sizes:
            median, right = _time(operation, num_bytes, seconds, device, ranks)
            rows.append(
                {
                    "name": f"{operation.name}, {num_bytes:,} bytes",
                    "operation": operation.name,
                    "bytes": num_bytes,
                    "seconds": median / operation.trips,
                    "wrong": not right,
                }
            )
    return rows


def _time(
    operation: Operation, num_bytes: int, seconds: float, device: torch.device, ranks: Ranks
) -> tuple[float, bool]:
    """The median time of a call on the slowest rank, and whether all results are right."""
    x = torch.empty(num_bytes // 4, device=device)

    def once() -> tuple[float, bool]:
        x.fill_(ranks.rank + 1.0)
        _wait_for(device)
        operation.meet()
        begin = time.perf_counter()
        result = operation.call(x)
        _wait_for(device)
        taken = time.perf_counter() - begin
        return taken, (result[0].item(), result[-1].item()) == operation.expected

    once()  # connects and allocates
    first, right = once()
    rounds = ranks.from_root(lambda: min(max(int(seconds / first), MIN_ROUNDS), MAX_ROUNDS))
    samples = [once() for _ in range(rounds)]
    every = ranks.gather(([s for s, _ in samples], right and all(r for _, r in samples)))
    slowest = [max(times) for times in zip(*(times for times, _ in every), strict=True)]
    return statistics.median(slowest), all(right for _, right in every)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Line:
    alpha: float  # seconds
    beta: float  # seconds per byte

    def __call__(self, num_bytes: int) -> float:
        return self.alpha + self.beta * num_bytes


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line with the least squares of relative errors."""
    weights = 1 / np.array(seconds)
    lines = np.stack([weights, weights * np.array(sizes)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(lines, np.ones(len(sizes)), rcond=None)
    return Line(float(alpha), float(beta))


def report_of(rows: Sequence[dict[str, Any]], world: str) -> Report:
    lines, summary = {}, []
    for name in dict.fromkeys(row["operation"] for row in rows):
        sizes, seconds = zip(
            *((row["bytes"], row["seconds"]) for row in rows if row["operation"] == name),
            strict=True,
        )
        line = lines[name] = fit(sizes, seconds)
        worst = max(abs(line(n) / s - 1) for n, s in zip(sizes, seconds, strict=True))
        summary.append(
            f"{name}: {1e6 * line.alpha:,.1f} us and {1e-9 / line.beta:,.3f} GB/s, within "
            f"{100 * worst:.0f} %"
        )
    rows = [{**row, "fitted": lines[row["operation"]](row["bytes"])} for row in rows]
    return Report(
        name="links",
        title=f"Messages and collectives by size: {world}",
        notes=(
            "Medians of the slowest rank: of a message half of there and back, of a collective "
            "from a barrier until the result is there. An all-gather has the bytes of each rank.",
            "fitted: alpha + beta * bytes by least squares of relative errors.",
        ),
        environment=environment(),
        rows=list(rows),
        columns=columns_of(
            rows,
            {
                "operation": lambda row: row["operation"],
                "bytes": lambda row: f"{row['bytes']:,}",
                "us": lambda row: f"{1e6 * row['seconds']:,.1f}",
                "fitted us": lambda row: f"{1e6 * row['fitted']:,.1f}",
                "GB/s": lambda row: f"{1e-9 * row['bytes'] / row['seconds']:,.3f}",
                "right": verdict,
            },
        ),
        summary=summary,
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "links")
    parser.add_argument("--largest", type=int, default=64 << 20, help="bytes (default 64 MiB)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each size (default 0.5)")
    add_device(parser)
    parsed = parser.parse_args(arguments)
    check_device(parser, parsed.device)
    sizes = [SMALLEST]
    while sizes[-1] * FACTOR <= parsed.largest:
        sizes.append(sizes[-1] * FACTOR)
    with joined_device(parsed.device) as (world, device):
        if world.size == 1:
            parser.error("one rank has no link: torchrun --nproc-per-node 2 benchmarks/links.py")
        rows = measure(sizes, parsed.seconds, device, Ranks())
        if not world.root:
            return int(any(row["wrong"] for row in rows))
        library = "NCCL" if device.type == "cuda" else "Gloo"
        return finish(report_of(rows, f"{world.size} ranks by {library}"), parsed.out, width=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
