# SPDX-License-Identifier: BSD-3-Clause
"""The speed at which hosts of ranks read memory and multiply, measured on all at once."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median

import torch
from torch import Tensor

from ..exchange import Communicator, MeasuredHost, measured_costs, on_every_rank
from ..ops import lean_decode
from .machines import SUSTAINED, Link, Machine, fitted_link, link_of_times

# Seconds of reading, and of multiplying. A quota of processor time falls due in hundredths of them.
_READ_SECONDS, _MULTIPLY_SECONDS = 0.2, 0.1
_READ_BYTES = 256 << 20  # more than caches keep
_HEADS_Q, _HEADS_KV, _HEAD_DIM = 32, 8, 128
_ROWS, _COLUMNS = 64, 2048
# Bytes that each rank sends in an exchange that is timed: of a token, and many more.
_SMALL, _LARGE, _TIMES = 16 << 10, 1 << 20, 5


def measure_host(device: torch.device, ranks_of_node: int) -> MeasuredHost:
    """Rates of this rank with its own threads, and its part of the memory that is free."""
    memory = _free_bytes(device) / ranks_of_node
    slots = _READ_BYTES // (2 * 2 * _HEADS_KV * _HEAD_DIM)
    # Written, as pages that nobody wrote are all the same one, which a cache keeps.
    k, v = torch.ones(2, 1, _HEADS_KV, slots, _HEAD_DIM, dtype=torch.bfloat16, device=device)
    q = torch.ones(1, _HEADS_Q, 1, _HEAD_DIM, dtype=torch.bfloat16, device=device)
    read = _READ_BYTES / _seconds_of(lambda: lean_decode(q, k, v), device, _READ_SECONDS)
    a, b = (torch.ones(n, _COLUMNS, dtype=torch.bfloat16, device=device) for n in (_ROWS, _COLUMNS))
    product = _seconds_of(lambda: a @ b.T, device, _MULTIPLY_SECONDS)
    return MeasuredHost(platform.node(), read, 2 * _ROWS * _COLUMNS**2 / product, memory)


def measure_all(
    op: str, comm: Communicator, device: torch.device, timeout: float, held: int = 0
) -> tuple[tuple[MeasuredHost, ...], Link]:
    """Collective: the hosts of all ranks, and the link between them, the same on every rank; from
    the table of `calibrate` where it has them. So many bytes that are `held` are in this rank's
    memory and count as free, as they did when the table was made."""
    # All begin together: sockets of one host share buses, and ranks its processors.
    comm.agree((("device", device.type),), timeout, op)
    costs, nodes = measured_costs(), comm.topology.nodes
    if costs is not None and costs.nodes == nodes and len(costs.machines) == comm.world_size:
        return costs.machines, fitted_link(costs, "the table")
    seconds = {size: _exchange_seconds(comm, size, device, timeout) for size in (_SMALL, _LARGE)}

    def measure() -> tuple[tuple[()], MeasuredHost]:
        host = measure_host(device, nodes.count(nodes[comm.rank]))
        return (), replace(host, memory=host.memory + held)

    _, notes = on_every_rank(
        op,
        comm,
        timeout,
        measure,
        lambda host: {**asdict(host), "seconds": [seconds[_SMALL], seconds[_LARGE]]},
    )
    hosts = tuple(
        MeasuredHost(str(note["host"]), *(float(note[x]) for x in ("read", "flop", "memory")))
        for note in notes
    )
    small, large = (max(note["seconds"][i] for note in notes) for i in range(2))
    link = link_of_times({_SMALL: small, _LARGE: large}, comm.world_size - 1, "measured")
    return hosts, link


def as_machine(host: MeasuredHost) -> Machine:
    """The host of a rank as the planner's arithmetic takes it."""
    return Machine(host.host, host.read, host.flop / SUSTAINED, host.memory, "", source="measured")


def _exchange_seconds(
    comm: Communicator, num_bytes: int, device: torch.device, timeout: float
) -> float:
    x, counts = torch.ones(num_bytes // 4, device=device), (num_bytes // 4,) * comm.world_size

    def exchange() -> Tensor:
        return comm.all_gather(x, counts, timeout=timeout)

    exchange()  # which compares the call and makes buffers
    return median(_timed(exchange, device) for _ in range(_TIMES))


def _seconds_of(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The mean time of `run`, which is called for so many seconds."""
    run()
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds or count == 0:
        _timed(run, device)
        count += 1
    return spent / count


def _timed(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        return 1024.0 * found[0]
    except (OSError, IndexError):  # no Linux: what is in use is not known
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
