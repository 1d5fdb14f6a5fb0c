# SPDX-License-Identifier: BSD-3-Clause
"""Measuring what exchanges cost: timed operations and exchanges, and the model's fit to them."""

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
from .clocks import Clock
from .communicator import Communicator
from .costs import Calibration, Costs, default_costs
from .measured import MeasuredExchange, MeasuredExchanges
from .messages import Messages
from .state import Message
from .strategies import candidates
from .topology import Topology
from .traffic import Case, Traffic, all_reduce, all_to_all, local, ring, to_ranks, traffic

_HEAD_DIM = 128
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19)  # bytes of a message
BATCHES = (1, 4, 16, 64)  # of one query of 32 heads
_NUM_HEADS = 32
_WARM_UP = 2
_MIN_ROUNDS, _MAX_ROUNDS = 5, 1000
# Between two rounds, for all ranks to come to rest; of the time that the last one took.
_PAUSE, _SLACK = 0.002, 0.3


@dataclass(frozen=True)
class Sample:
    """One operation, or one whole exchange, of one size."""

    operation: str
    num_bytes: int
    work: Traffic
    seconds: float  # the median, from the last rank's start to the last rank's end


def calibrate(
    comm: Communicator,
    device: torch.device,
    seconds: float,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> tuple[Calibration, list[Sample]]:
    """Times exchanges and what they are made of, `seconds` each; the same result on all ranks.

    Collective, on a communicator of at least two ranks.

    Raises:
        ExchangeError: a rank was lost or stalled.
    """
    comm.agree((("call", "calibrate"), ("device", device.type)))  # which also finds the nodes
    backend, nodes = comm.backend(device), comm.topology.nodes
    operations = [
        (name, num_bytes, work, run)
        for num_bytes in SIZES
        for name, (work, run) in _operations(comm, num_bytes, device).items()
    ]
    otherwise = default_costs(backend)
    # Changing from one call to another compares signatures, which would be timed too.
    exchanging = Communicator(comm.link.group, comm.timeout, nodes=nodes, costs=otherwise)
    exchanging.exchange(torch.ones(1, 1, 1, 1, device=device), torch.ones(1, 1, 1, device=device))
    names = candidates(torch.float32, head_sharded=False, unavailable=exchanging.unavailable)
    clock = comm.call((("call", "calibrate clocks"),), partial(Clock.agree, comm.link, device))
    total = len(operations) + len(BATCHES) * len(names)
    samples: list[Sample] = []
    measured = []
    for name, num_bytes, work, run in operations:
        taken = _time(comm, clock, name, run, device, seconds)
        samples.append(Sample(name, num_bytes, work, taken))
        progress(len(samples), total)
    for batch in BATCHES:
        shape = (batch, _NUM_HEADS, 1, _HEAD_DIM)
        message = Message(shape[:-1], _HEAD_DIM, torch.float32)
        case = Case(comm.topology, message, torch.float32, backend=backend)
        o, lse = torch.ones(shape, device=device), torch.zeros(shape[:-1], device=device)
        for name in names:

            def exchange(
                deadline: float, name: str = name, o: Tensor = o, lse: Tensor = lse
            ) -> None:
                exchanging.exchange(o, lse, name, timeout=deadline - time.monotonic())

            taken = _time(comm, clock, name, exchange, device, seconds)
            samples.append(Sample(name, message.num_bytes, traffic(name, case), taken))
            measured.append(MeasuredExchange(name, message.num_rows, _HEAD_DIM, taken))
            progress(len(samples), total)
    # The times are on every rank, and so is what is fitted to them.
    costs = fit(samples, otherwise)
    return Calibration(costs, MeasuredExchanges(backend, nodes, tuple(measured))), samples


Operation = tuple[Traffic, Callable[[float], object]]


def _operations(comm: Communicator, num_bytes: int, device: torch.device) -> dict[str, Operation]:
    link, topology, world_size = comm.link, comm.topology, comm.world_size
    backend = comm.backend(device)
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
            ring(topology, num_bytes, backend),
            lambda deadline: link.all_gather(receive, send, deadline),
        ),
        "all-to-all": (
            all_to_all(topology, num_bytes, backend),
            lambda deadline: link.all_to_all(receive, parts, deadline),
        ),
        "all-reduce": (
            all_reduce(topology, num_bytes, backend),
            lambda deadline: link.all_reduce(numbers, dist.ReduceOp.SUM, deadline),
        ),
        "merge": (
            local(1, states.nbytes),
            lambda deadline: merge_states(o_parts, lse_parts, out=merged),
        ),
    }
    for name, (ranks, work) in _peers(comm.rank, topology, num_bytes, backend).items():
        buffers = {rank: receive[rank] for rank in ranks}
        step = Messages(link, buffers, dict.fromkeys(ranks, send), 0, device)
        operations[name] = (work, step.run)
    return operations


def _peers(
    rank: int, topology: Topology, num_bytes: int, backend: str
) -> dict[str, tuple[list[int], Traffic]]:
    """Rounds of messages: with everybody, and in pairs inside a node and between nodes."""
    world_size = topology.world_size
    others = [other for other in range(world_size) if other != rank]
    far = world_size - min(topology.node_sizes)
    work = to_ranks(world_size - 1 - far, far, num_bytes, backend)
    peers = {"messages to all": (others, work)}
    for distance in (1 << level for level in range((world_size - 1).bit_length())):
        pairs = [(r, r ^ distance) for r in range(world_size) if r ^ distance < world_size]
        are_far = {topology.nodes[a] != topology.nodes[b] for a, b in pairs}
        if len(are_far) > 1:
            continue  # some pairs near, some not
        is_far = are_far == {True}
        peer = [rank ^ distance] if rank ^ distance < world_size else []
        work = to_ranks(int(not is_far), int(is_far), num_bytes, backend)
        peers.setdefault("pairs of nodes" if is_far else "pairs in a node", (peer, work))
    return peers


def _time(
    comm: Communicator,
    clock: Clock,
    name: str,
    run: Callable[[float], object],
    device: torch.device,
    seconds: float,
) -> float:
    """The median of as many rounds as fit, which all ranks begin at agreed times."""

    def largest(values: Sequence[float], deadline: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        comm.link.all_reduce(tensor, dist.ReduceOp.MAX, deadline)
        return tensor.tolist()

    def rounds(deadline: float) -> float:
        run(deadline)  # which prepares it
        begin = clock.now()
        for _ in range(_WARM_UP):
            run(deadline)
        [a_round] = largest([(clock.now() - begin) / _WARM_UP], deadline)
        interval = (1 + _SLACK) * a_round + _PAUSE
        count = max(_MIN_ROUNDS, min(int(seconds / interval), _MAX_ROUNDS))
        [last] = largest([clock.now()], deadline)
        starts, ends = [], []
        for i in range(1, count + 1):
            time.sleep(max(0.0, last + i * interval - clock.now()))
            starts.append(clock.now())
            run(deadline)
            ends.append(clock.now())
        times = np.array(largest(starts + ends, deadline)).reshape(2, count)
        return float(np.median(times[1] - times[0]))

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
