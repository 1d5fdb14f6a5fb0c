# SPDX-License-Identifier: BSD-3-Clause
"""The speed at which hosts of ranks read memory, multiply and do the rest of a layer, measured on
all at once."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .._memory import shared_bytes
from ..exchange import Communicator, MeasuredHost, measured_costs, on_every_rank
from ..ops import lean_decode
from .machines import SUSTAINED, Link, Machine, fitted_link, link_of_times
from .models import BF16, Attention

# Seconds of reading, of multiplying, and of layers. A quota of processor time falls due in
# hundredths of them.
_READ_SECONDS, _MULTIPLY_SECONDS, _LAYER_SECONDS = 0.2, 0.1, 0.1
_READ_BYTES = 256 << 20  # more than caches keep
_MOST_OPERATIONS = 4 << 30  # of a call that reads them
CALIBRATED = Attention(layers=1, heads=32, kv_heads=8, key=128, value=128)
_ROWS, _COLUMNS = 64, 2048
# Widths of a slice so narrow that its layer is mostly small operations, and of a wide slice; keys
# in the cache of a layer that is timed, so few that reading them takes no time; and how often it is
# timed at least.
_NARROW, _WIDE, _FEW_KEYS, _LEAST_LAYERS = 128, 8192, 32, 5
# Bytes that each rank sends in an exchange that is timed: of a token, and many more.
_SMALL, _LARGE, _TIMES = 16 << 10, 1 << 20, 5


def measure_host(
    device: torch.device, ranks_of_node: int, attention: Attention = CALIBRATED
) -> MeasuredHost:
    """Rates of this rank with its own threads, the time of a layer's small operations, and this
    rank's part of the memory that is free. Keys are read by the heads of `attention`, as a host
    that is busy with each key's softmax or with many heads reads fewer bytes of them."""
    memory = _free_bytes(device) / ranks_of_node
    # Written, as pages that nobody wrote are all the same one, which a cache keeps.
    numbers = torch.ones(_READ_BYTES // BF16, dtype=torch.bfloat16, device=device)
    q, k, v = _queries_and_keys(attention, numbers)
    num_bytes = _key_bytes(attention) * k.shape[2]
    read = num_bytes / _seconds_of(lambda: lean_decode(q, k, v), device, _READ_SECONDS)
    a, b = (torch.ones(n, _COLUMNS, dtype=torch.bfloat16, device=device) for n in (_ROWS, _COLUMNS))
    product = _seconds_of(lambda: a @ b.T, device, _MULTIPLY_SECONDS)
    flop = 2 * _ROWS * _COLUMNS**2 / product
    wide, narrow = _layers(numbers, device)
    weights = 2 * _WIDE * _COLUMNS / wide
    layer = narrow - _PRODUCTS * 2 * _NARROW * _COLUMNS / weights
    return MeasuredHost(platform.node(), read, weights, flop, memory, max(0.0, layer))


def measure_all(
    op: str,
    comm: Communicator,
    device: torch.device,
    timeout: float,
    attention: Attention = CALIBRATED,
    held: int = 0,
) -> tuple[tuple[MeasuredHost, ...], Link]:
    """Collective: the hosts of all ranks, and the link between them, the same on every rank. So
    many bytes that are `held` are in this rank's memory and count as free."""
    # All begin together: sockets of one host share buses, and ranks its processors.
    comm.agree((("device", device.type),), timeout, op)
    nodes = comm.topology.nodes
    seconds = {size: _exchange_seconds(comm, size, device, timeout) for size in (_SMALL, _LARGE)}

    def measure() -> tuple[tuple[()], MeasuredHost]:
        host = measure_host(device, nodes.count(nodes[comm.rank]), attention)
        return (), replace(host, memory=host.memory + held)

    _, notes = on_every_rank(
        op,
        comm,
        timeout,
        measure,
        lambda host: {**asdict(host), "seconds": [seconds[_SMALL], seconds[_LARGE]]},
    )
    hosts = tuple(
        MeasuredHost(**{name: note[name] for name in MeasuredHost.__annotations__})
        for note in notes
    )
    small, large = (max(note["seconds"][i] for note in notes) for i in range(2))
    link = link_of_times({_SMALL: small, _LARGE: large}, comm.world_size - 1, "measured")
    return hosts, link


def known_machines(
    op: str,
    comm: Communicator,
    device: torch.device,
    timeout: float,
    attention: Attention,
    held: int = 0,
) -> tuple[tuple[Machine, ...], Link]:
    """As `measure_all`, for the planner; from the table of `calibrate` where it has the hosts,
    whose memory was free of what is `held` when the table was made."""
    costs, nodes = measured_costs(), comm.topology.nodes
    if costs is not None and costs.nodes == nodes and len(costs.machines) == comm.world_size:
        return tuple(map(as_machine, costs.machines)), fitted_link(costs, "the table")
    hosts, link = measure_all(op, comm, device, timeout, attention, held)
    return tuple(as_machine(host, attention) for host in hosts), link


def as_machine(host: MeasuredHost, attention: Attention = CALIBRATED) -> Machine:
    """The host of a rank as the planner's arithmetic takes it, measured with this attention."""
    return Machine(
        host.host,
        host.read,
        host.flop / SUSTAINED,
        host.memory,
        "",
        source="measured",
        weights_bandwidth=host.weights,
        layer_seconds=host.layer,
        operations_with_a_byte=_operations(attention) / _key_bytes(attention),
    )


def _operations(attention: Attention) -> int:
    """Operations of a new token for each key."""
    return 2 * attention.heads * sum(attention.step)


def _key_bytes(attention: Attention) -> int:
    """Bytes that a new token reads of each key and its value, in bfloat16."""
    return attention.token_bytes("bf16") - attention.index_bytes


def _queries_and_keys(attention: Attention, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of a new token whose keys and values are, together, as large as `numbers`."""
    heads, (key, value) = attention.kv_heads, attention.step
    slots = BF16 * numbers.numel() // _key_bytes(attention)
    # With many heads a call reads fewer keys, so that the others do not wait long for a slow host.
    # It then multiplies for longer than it reads, so keys that a cache holds make it no faster.
    slots = min(slots, _MOST_OPERATIONS // _operations(attention))
    k = numbers[: heads * slots * key].view(1, heads, slots, key)
    if attention.latent is None:
        v = numbers[k.numel() :][: heads * slots * value].view(1, heads, slots, value)
    else:
        v = k[..., :value]
    return numbers[: attention.heads * key].view(1, attention.heads, 1, key), k, v


_PRODUCTS = 7  # of a layer: q, k, v, o, gate, up and down


def _layers(numbers: Tensor, device: torch.device) -> tuple[float, float]:
    """The median times of a wide product, and of a layer of narrow slices that comes after it.

    As in a model, a layer finds in no cache what it works with: the wide product before it and the
    layers since the last use of the same weights have taken the room.
    """
    parts = numbers.view(-1, _WIDE, _COLUMNS)
    q, k, v = _queries_and_keys(CALIBRATED, numbers)
    k, v = (x[:, :, :_FEW_KEYS].contiguous() for x in (k, v))
    x = torch.ones(1, 1, _COLUMNS, dtype=numbers.dtype, device=device)
    times: tuple[list[float], list[float]] = [], []
    begin, count = time.perf_counter(), 0
    while count < _LEAST_LAYERS or time.perf_counter() - begin < _LAYER_SECONDS:
        wide, narrow = parts[count % len(parts)], parts[(count + len(parts) // 2) % len(parts)]
        times[0].append(_timed(lambda: linear(x, wide), device))  # noqa: B023
        times[1].append(_timed(lambda: _narrow_layer(x, narrow, q, k, v), device))  # noqa: B023
        count += 1
    return median(times[0][1:]), median(times[1][1:])


def _narrow_layer(x: Tensor, weights: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The work of a rank with little of a layer for a token, in the operators of a Llama."""
    matrices = weights.view(-1, _NARROW * _COLUMNS)[:_PRODUCTS]
    q_, k_, v_, gate, up = (m.view(_NARROW, _COLUMNS) for m in matrices[:5])
    o, down = (m.view(_COLUMNS, _NARROW) for m in matrices[5:])
    y = _norm(x)
    own = linear(y, q_).view(1, 1, 1, _NARROW)
    new = [linear(y, m).view(1, 1, 1, _NARROW) for m in (k_, v_)]
    rotated = [_rotated(z) for z in (q, own, new[0])]
    partial, _ = lean_decode(rotated[0], k, v)
    y = x + linear(partial[:, 0].reshape(1, 1, _NARROW), o)
    z = _norm(y)
    return y + linear(silu(linear(z, gate)) * linear(z, up), down)


def _norm(x: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return y.to(x.dtype) * x


def _rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * x + torch.cat((-b, a), dim=-1) * x


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
    free = shared_bytes(with_swap=False)
    if free is None:  # what is in use is not known
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    return float(free)
