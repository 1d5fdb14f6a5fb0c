# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a benchmark: where they are, what connects them, what "auto" makes of that, and what
they tell each other."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tree_attention._environment import read_integer
from tree_attention.cli.world import World, joined_world
from tree_attention.exchange import Communicator, Topology, strategies
from tree_attention.exchange.auto.choose import Choice, choose, measured_costs
from tree_attention.exchange.transport.buffers import StateLayout

from .measure import Load, Samples

_ROUND_TRIPS = 9
CPU = torch.device("cpu")
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

T = TypeVar("T")


def hosts_of(names: Sequence[str]) -> str:
    """ "ranks 0 to 3 on a, 4 on b" from the host of each rank."""
    runs = []
    for name, members in groupby(enumerate(names), key=lambda item: item[1]):
        ranks = [rank for rank, _ in members]
        runs.append(f"{_range(ranks)} on {name}")
    return f"rank{'s' * (len(names) > 1)} " + ", ".join(runs)


def _range(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def round_trips() -> list[float]:
    """Seconds that a byte takes from rank 0 to each other rank and back; on every rank.

    Collective, over the default process group.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    byte, times = torch.zeros(1, dtype=torch.uint8), []
    for other in range(1, size):
        samples = []
        for _ in range(1 + _ROUND_TRIPS):
            begin = time.perf_counter()
            there_and_back(rank, other, byte)
            samples.append(time.perf_counter() - begin)
        times.append(statistics.median(samples[1:]))  # the first one connects
    box = [times]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def there_and_back(rank: int, other: int, x: Tensor) -> Tensor:
    """Sends `x` from rank 0 to the other and back; collective for these two."""
    if rank == 0:
        dist.send(x, other)
        dist.recv(x, other)
    elif rank == other:
        dist.recv(x, 0)
        dist.send(x, 0)
    return x


def links_of(topology: Topology, times: Sequence[float], backend: str) -> str:
    """From the `round_trips` of a group whose messages `backend` carries."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    device = os.environ.get(variable)
    through = f"device {device} ({variable})" if device else f"the device {backend} found"
    levels: dict[str, list[float]] = {"in its node": [], "in other nodes": []}
    for node, seconds in zip(topology.nodes[1:], times, strict=True):
        near = node == topology.nodes[0]
        levels["in its node" if near else "in other nodes"].append(1e3 * seconds)
    texts = [
        f"to ranks {where} {statistics.median(some):.2f} ms ({min(some):.2f} to {max(some):.2f})"
        for where, some in levels.items()
        if some
    ]
    return f"{backend} over {through}; a byte from rank 0 and back: {', '.join(texts)}"


def available_strategies(comm: Communicator, device: torch.device = CPU) -> list[str]:
    """The strategies that can run on tensors of the device of these ranks; collective."""
    state = torch.ones(1, 1, 1, 1, device=device), torch.ones(1, 1, 1, device=device)
    comm.all_merge_states(*state)  # which finds out
    return [name for name in strategies() if name not in comm.unavailable(device)]


def choice_of(comm: Communicator, layout: StateLayout, device: torch.device = CPU) -> Choice:
    """Return what "auto" takes for states of `layout` on a used communicator, and why."""
    return choose(
        layout,
        comm.topology,
        comm.link.backend(device),
        costs=measured_costs(),
        unavailable=comm.unavailable(device),
    )


def others_share(ranks: Ranks, load: Load) -> float | None:
    """CPU time that went to none of the ranks; None when they are on several machines."""
    loads = ranks.gather((platform.node(), load.busy, load.own))
    owns = [own for _, _, own in loads if own is not None]
    if len({node for node, _, _ in loads}) > 1 or load.busy is None or len(owns) < len(loads):
        return None
    return max(0.0, load.busy - sum(owns))


def slowest_rank(ranks: Ranks, samples: Samples) -> Samples:
    """For each call the time of the rank that took longest."""
    return Samples([max(times) for times in zip(*ranks.gather(samples.seconds), strict=True)])


class Ranks:
    """The world, or this process alone."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_root(self, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is called on rank 0 alone."""
        box = [make() if self.rank == 0 else None]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]


@contextmanager
def joined_device(name: str) -> Iterator[tuple[World, torch.device]]:
    """The world of torchrun, over Gloo for "cpu" and NCCL for "cuda", and this rank's device."""
    with joined_world(_BACKENDS[name]) as world:
        yield world, device_of(name)


def device_of(name: str) -> torch.device:
    """The device of this rank: of several GPUs, that of its number on the host."""
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", read_integer("LOCAL_RANK", 0, torch.cuda.device_count() - 1, 0))
    torch.cuda.set_device(device)
    return device


def start_ranks(world_size: int, program: Sequence[str], **variables: str) -> Any:
    """Return what `run_rank` writes on ranks of a thread that torchrun starts on this machine.

    `program` is a file, or -m and a module, and its options, of which the last takes the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world_size), *program, str(out)]
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
        subprocess.run(command, check=True, env=os.environ | variables)
        return json.loads(out.read_text())


def run_rank(out: Path, run: Callable[[Ranks], Any], device: str = "cpu") -> None:
    """Everything that a rank with one thread does: joins the world, runs, and leaves it.

    Rank 0 writes what `run` returned there to `out`, as JSON.
    """
    torch.set_num_threads(1)
    dist.init_process_group(_BACKENDS[device])
    ranks = Ranks()
    with torch.inference_mode():
        result = run(ranks)
    if ranks.rank == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
