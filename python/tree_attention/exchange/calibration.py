# SPDX-License-Identifier: BSD-3-Clause
"""Measuring the constants of `Costs`: timed operations, and the fit of the model to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import combinations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import merge_states
from .communicator import Communicator
from .costs import Costs
from .messages import Messages
from .state import Message
from .strategies import strategies
from .topology import Topology
from .traffic import Case, Traffic, all_reduce, all_to_all, local, ring, to_ranks, traffic

_HEAD_DIM = 128
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19)  # bytes of a message
SHAPES = ((1, 32, 1, _HEAD_DIM), (16, 32, 1, _HEAD_DIM), (64, 32, 1, _HEAD_DIM))  # of an o
_WARM_UP = 3
_MIN_ROUNDS = 5


@dataclass(frozen=True)
class Sample:
    """One operation, or one whole exchange, of one size."""

    operation: str
    num_bytes: int
    work: Traffic
    seconds: float  # the median of the slowest rank's times


def measure(comm: Communicator, device: torch.device, seconds: float) -> list[Sample]:
    """Times exchanges and what they are made of, `seconds` each; the same samples on all ranks.

    Collective, on a communicator of at least two ranks.

    Raises:
        ExchangeError: a rank was lost or stalled.
    """
    comm.agree((("call", "calibrate"), ("device", device.type)))  # which also finds the nodes
    samples = []
    for num_bytes in SIZES:
        for name, (work, run) in _operations(comm, num_bytes, device).items():
            samples.append(Sample(name, num_bytes, work, _time(comm, name, run, device, seconds)))
    # Changing from one call to another compares signatures, which would be timed too.
    exchanging = Communicator(comm.link.group, comm.timeout)
    for shape in SHAPES:
        message = Message(shape[:-1], shape[-1], torch.float32)
        state = torch.ones(shape, device=device), torch.zeros(shape[:-1], device=device)
        for name in strategies():
            run = partial(_exchange, exchanging, state, name)
            taken = _time(comm, name, run, device, seconds)
            work = traffic(name, Case(comm.topology, message, torch.float32))
            samples.append(Sample(name, message.num_bytes, work, taken))
    return samples


def _exchange(
    comm: Communicator, state: tuple[Tensor, Tensor], strategy: str, deadline: float
) -> None:
    comm.exchange(*state, strategy, timeout=deadline - time.monotonic())


Operation = tuple[Traffic, Callable[[float], object]]


def _operations(comm: Communicator, num_bytes: int, device: torch.device) -> dict[str, Operation]:
    link, topology, world_size = comm.link, comm.topology, comm.world_size
    send = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    receive = torch.zeros(world_size, num_bytes, dtype=torch.uint8, device=device)
    parts = torch.zeros_like(receive)
    numbers = torch.zeros(num_bytes // 4, device=device)
    rows = num_bytes // (4 * (_HEAD_DIM + 1))
    message = Message((max(rows, 1),), _HEAD_DIM, torch.float32)
    states = torch.zeros(world_size, message.num_bytes, dtype=torch.uint8, device=device)
    o_parts, lse_parts = message.views(states)
    merged = message.views(torch.zeros(message.num_bytes, dtype=torch.uint8, device=device))
    operations: dict[str, Operation] = {
        "all-gather": (
            ring(topology, num_bytes),
            lambda deadline: link.all_gather(receive, send, deadline),
        ),
        "all-to-all": (
            all_to_all(topology, num_bytes),
            lambda deadline: link.all_to_all(receive, parts, deadline),
        ),
        "all-reduce": (
            all_reduce(topology, num_bytes),
            lambda deadline: link.all_reduce(numbers, dist.ReduceOp.SUM, deadline),
        ),
        "merge": (
            local(1, states.nbytes),
            lambda deadline: merge_states(o_parts, lse_parts, out=merged),
        ),
    }
    for name, (ranks, work) in _peers(comm.rank, topology, num_bytes).items():
        buffers = {rank: receive[rank] for rank in ranks}
        step = Messages(link, buffers, dict.fromkeys(ranks, send), 0, device)
        operations[name] = (work, step.run)
    return operations


def _peers(rank: int, topology: Topology, num_bytes: int) -> dict[str, tuple[list[int], Traffic]]:
    """Rounds of messages: with everybody, and in pairs inside a node and between nodes."""
    world_size = topology.world_size
    others = [other for other in range(world_size) if other != rank]
    far = world_size - min(topology.node_sizes)
    peers = {"messages to all": (others, to_ranks(world_size - 1 - far, far, num_bytes))}
    for distance in (1 << level for level in range((world_size - 1).bit_length())):
        pairs = [(r, r ^ distance) for r in range(world_size) if r ^ distance < world_size]
        are_far = {topology.nodes[a] != topology.nodes[b] for a, b in pairs}
        if len(are_far) > 1:
            continue  # some pairs near, some not
        is_far = are_far == {True}
        peer = [rank ^ distance] if rank ^ distance < world_size else []
        work = to_ranks(0, 1, num_bytes) if is_far else to_ranks(1, 0, num_bytes)
        peers.setdefault("pairs of nodes" if is_far else "pairs in a node", (peer, work))
    return peers


def _time(
    comm: Communicator,
    name: str,
    run: Callable[[float], object],
    device: torch.device,
    seconds: float,
) -> float:
    """The median time of the rank that takes longest, for as many rounds as fit."""
    tensor = torch.zeros(1, dtype=torch.float64, device=device)

    def slowest(value: float, deadline: float) -> float:
        # Also brings the ranks into step.
        tensor.fill_(value)
        comm.link.all_reduce(tensor, dist.ReduceOp.MAX, deadline)
        return float(tensor)

    def timed(deadline: float) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run(deadline)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    def rounds(deadline: float) -> float:
        a_round = max(slowest(timed(deadline), deadline) for _ in range(_WARM_UP))
        count = max(_MIN_ROUNDS, min(int(seconds / a_round), 1000))
        return float(np.median([slowest(timed(deadline), deadline) for _ in range(count)]))

    return comm.call((("call", f"calibrate {name}"),), rounds, comm.timeout + 10 * seconds)


def fit(samples: Sequence[Sample], otherwise: Costs) -> Costs:
    """The constants that predict the samples best, in relative terms, none of them negative.

    What no sample depends on, as steps between nodes on one node, keeps its cost of `otherwise`.
    """
    names = [field.name for field in fields(Costs)]
    counts = np.array([astuple(sample.work) for sample in samples], dtype=float)
    relative = counts / np.array([sample.seconds for sample in samples])[:, None]
    used = [i for i in range(len(names)) if relative[:, i].any()]
    scale = np.linalg.norm(relative[:, used], axis=0)
    best = _non_negative_least_squares(relative[:, used] / scale, np.ones(len(samples))) / scale
    values = list(astuple(otherwise))
    for i, value in zip(used, best, strict=True):
        values[i] = float(value)
    return Costs(*values)


def _non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By trying every set of columns that may be positive: there are few."""
    num_columns = a.shape[1]
    best, least = np.zeros(num_columns), float(b @ b)
    for size in range(1, num_columns + 1):
        for columns in combinations(range(num_columns), size):
            x, *_ = np.linalg.lstsq(a[:, columns], b, rcond=None)
            error = float(((a[:, columns] @ x - b) ** 2).sum())
            if (x >= 0).all() and error < least:
                best, least = np.zeros(num_columns), error
                best[list(columns)] = x
    return best
