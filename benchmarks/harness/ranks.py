# SPDX-License-Identifier: BSD-3-Clause
"""Where the ranks of a benchmark are, what connects them, and what "auto" makes of that."""

import os
import statistics
import time
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from tree_attention.exchange import Communicator, Topology, strategies
from tree_attention.exchange.costs import COSTS_VARIABLE, choose, predict
from tree_attention.exchange.strategies import candidates
from tree_attention.exchange.traffic import Case

_ROUND_TRIPS = 9


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
            if rank == 0:
                dist.send(byte, other)
                dist.recv(byte, other)
            elif rank == other:
                dist.recv(byte, 0)
                dist.send(byte, 0)
            samples.append(time.perf_counter() - begin)
        times.append(statistics.median(samples[1:]))  # the first one connects
    box = [times]
    dist.broadcast_object_list(box, src=0)
    return box[0]


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


def available_strategies(comm: Communicator) -> list[str]:
    """Those that can run on the host's tensors of these ranks; collective."""
    comm.exchange(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1))  # which finds out
    return [name for name in strategies() if name not in comm.unavailable]


def chosen_by_auto(comm: Communicator, case: Case) -> str:
    """The strategy that "auto" takes on a communicator that has been used."""
    return choose(case, comm.costs(torch.device("cpu")), comm.unavailable)


def choice_of(comm: Communicator, case: Case) -> str:
    """What "auto" takes for this exchange, and the predictions that made it."""
    costs = comm.costs(torch.device("cpu"))
    chosen = chosen_by_auto(comm, case)
    names = candidates(case.message.dtype, case.head_sharded, canonical=True)
    times = predict(case, costs, tuple(name for name in names if name not in comm.unavailable))
    predictions = ", ".join(
        f"{name} {1e6 * times[name]:,.0f}" for name in sorted(times, key=times.__getitem__)
    )
    file = os.environ.get(COSTS_VARIABLE)
    source = f"those of {file}" if file else "shipped ones; measure your own with calibrate"
    return (
        f"auto takes {chosen} for {case.message.num_bytes:,} bytes over {case.topology}: predicted "
        f"us {predictions} (constants: {source})"
    )
