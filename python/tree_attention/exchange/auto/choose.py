# SPDX-License-Identifier: BSD-3-Clause
"""The choice of "auto": by times measured on these very ranks, or else by a short rule.

Both are functions of what all ranks share, so all ranks choose alike.
"""

import hashlib
import json
import math
import os
import reprlib
from bisect import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..._environment import COSTS_VARIABLE, VariableError
from ..._json import read_json_object, replace_file
from ..._numbers import MAX_SECONDS
from ..strategies import STRATEGIES, candidates
from ..transport.buffers import StateLayout
from ..transport.topology import Topology

_FORMAT = 5
_READ_FORMATS = (3, 4, 5)  # before 5, no machines or without the times of their layers
_MIN_SECONDS = 1e-9  # of an exchange: sizes and times are divided by each other
_RATES, _MAX_RATE = ("read", "weights", "flop", "memory"), 1e18

# Where the ranks of a group are, as far as it matters to a choice: all on one node; on nodes whose
# ranks may merge first (`Topology.subtree_size`); or on nodes of one or of an odd number of ranks.
_ONE_NODE, _SHARED, _SINGLE = "one node", "nodes of several ranks", "nodes of one rank"
_ANYWHERE = (_ONE_NODE, _SHARED, _SINGLE)


@dataclass(frozen=True)
class Rule:
    """A row of the shipped table: which strategy it takes for which groups and messages."""

    backend: str  # "nccl"; "gloo" stands for all others
    min_world_size: int
    placements: tuple[str, ...]
    max_bytes: float
    strategy: str

    def applies(self, backend: str, topology: Topology, num_bytes: int) -> bool:
        on_several = _SHARED if topology.subtree_size > 1 else _SINGLE
        return (
            self.backend == ("nccl" if backend == "nccl" else "gloo")
            and topology.world_size >= self.min_world_size
            and (_ONE_NODE if topology.num_nodes == 1 else on_several) in self.placements
            and num_bytes <= self.max_bytes
        )

    def __str__(self) -> str:
        where = "anywhere" if self.placements == _ANYWHERE else "on " + " or ".join(self.placements)
        is_bounded = self.max_bytes < math.inf
        size = f"messages up to {self.max_bytes:,} bytes" if is_bounded else "any message"
        return f"{self.backend}, {self.min_world_size} or more ranks {where}, {size}"


# The first row that applies and whose strategy is available decides.
# Gloo: benchmarks/results/cluster.md, measured on emulated clusters of 2 to 16 ranks. 32 KiB lie
# between two sizes measured: there the states of 8 ranks take as long to send as one more step
# does, on a link that carries 125 kB in that time (1 Gb/s and 1 ms, or 10 Gb/s and 0.1 ms).
# NCCL: arithmetic, not measured on GPUs. By the latencies and bandwidths in NCCL's tuning tables a
# further collective with its copies costs 30 us, which is what (p - 1) - 2 (p - 1) / p states of
# 2 MiB take between 8 GPUs over NVLink 4 (360 GB/s), and of 128 KiB between 16 over InfiniBand NDR.
RULES = (
    Rule("gloo", 8, _ANYWHERE, 32 << 10, "butterfly"),
    Rule("gloo", 4, _ANYWHERE, 32 << 10, "all_gather"),
    Rule("gloo", 4, (_SHARED,), math.inf, "hierarchical"),
    Rule("gloo", 4, _ANYWHERE, math.inf, "two_phase"),
    Rule("gloo", 2, _ANYWHERE, 512 << 10, "all_gather"),
    Rule("gloo", 2, _ANYWHERE, math.inf, "two_phase"),
    Rule("nccl", 2, (_ONE_NODE,), 2 << 20, "one_shot"),
    Rule("nccl", 2, (_ONE_NODE,), 2 << 20, "all_gather"),
    Rule("nccl", 2, (_SINGLE,), 128 << 10, "all_gather"),
    Rule("nccl", 2, (_SHARED,), math.inf, "hierarchical"),
    Rule("nccl", 4, (_ONE_NODE, _SINGLE), math.inf, "two_phase"),
    Rule("nccl", 2, _ANYWHERE, math.inf, "all_gather"),
)


@dataclass(frozen=True)
class Measured:
    """A whole exchange of a float32 state that `calibrate` timed: the median of its seconds."""

    strategy: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredHost:
    """Speed and memory of one rank's host, measured while all ranks measured theirs."""

    host: str  # its name
    read: float  # bytes of keys and values a second, by `lean_decode`
    weights: float  # bytes of weights a second, by a product with one row
    flop: float  # operations a second, of a product with many rows in bfloat16
    memory: float  # bytes that were free, for each rank of the host
    layer: float  # seconds of a decoder layer beyond reading its weights and keys


@dataclass(frozen=True)
class CostTable:
    """Measured exchanges of one group of ranks: its backend, and the node of each rank; and the
    machines by rank, where `calibrate` measured them."""

    backend: str
    nodes: tuple[int, ...]
    exchanges: tuple[Measured, ...]
    machines: tuple[MeasuredHost, ...] = ()

    def covers(self, backend: str, topology: Topology) -> bool:
        return (backend, topology.nodes) == (self.backend, self.nodes)

    def seconds(self, strategy: str, num_bytes: int) -> float | None:
        """Time of an exchange, or None where the strategy was not measured.

        Between two measured sizes, time and size are interpolated by their logarithms.
        Smaller messages take what the smallest took, larger ones as much longer as they are larger.
        """
        times = {x.num_bytes: x.seconds for x in self.exchanges if x.strategy == strategy}
        if not times:
            return None
        sizes = sorted(times)
        above = bisect(sizes, num_bytes)
        if above == 0:
            return times[sizes[0]]
        below = sizes[above - 1]
        if above == len(sizes):
            return times[below] * num_bytes / below
        share = math.log(num_bytes / below) / math.log(sizes[above] / below)
        return float(times[below] ** (1 - share) * times[sizes[above]] ** share)

    @cached_property
    def digest(self) -> str:
        """Equal for equal tables, and short enough for an error message."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def save(self, path: str | Path, remarks: Mapping[str, object]) -> None:
        """`remarks` say where the table comes from."""
        head = {"format": _FORMAT, "backend": self.backend, "nodes": self.nodes, **remarks}
        lists = ("machines", self.machines), ("exchanges", self.exchanges)
        text = json.dumps(head)[:-1]
        for name, entries in lists[not self.machines :]:
            rows = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in entries)
            text += f', "{name}": [\n{rows}\n]'
        text += "}\n"
        replace_file(path, text)

    @staticmethod
    def load(path: str | Path) -> "CostTable":
        """The table that `save` wrote."""
        what = "table of exchange costs"
        try:
            content = read_json_object(path, what)
            if flaw := _flaw(content):
                raise ValueError(f"{what} {path}: {flaw}")
        except (OSError, ValueError) as error:
            reason = f"{what} {path}: {error.strerror}" if isinstance(error, OSError) else error
            raise ValueError(
                f"{reason}; write a new one with `python -m tree_attention calibrate`"
            ) from None
        exchanges = (
            Measured(row["strategy"], row["num_bytes"], float(row["seconds"]))
            for row in content["exchanges"]
        )
        machines = (
            MeasuredHost(row["host"], *(float(row[name]) for name in (*_RATES, "layer")))
            for row in _machines(content)
        )
        nodes = tuple(content["nodes"])
        return CostTable(content["backend"], nodes, tuple(exchanges), tuple(machines))


def _machines(content: dict[str, Any]) -> Any:
    return content.get("machines", []) if content["format"] == _FORMAT else []


def _flaw(content: dict[str, Any]) -> str:
    """Why this is no table that `CostTable.save` wrote, or nothing."""
    backend, nodes, rows = (content.get(name) for name in ("backend", "nodes", "exchanges"))
    if content.get("format") not in _READ_FORMATS:
        return "it was written by another version"
    if not isinstance(backend, str):
        return f"backend must be a string, got {reprlib.repr(backend)}"
    if not isinstance(nodes, list) or not all(type(node) is int for node in nodes):
        return f"nodes must be a list of integers, got {reprlib.repr(nodes)}"
    if not isinstance(rows, list):
        return f"exchanges must be a list, got {reprlib.repr(rows)}"
    for row in rows:
        if not (
            isinstance(row, dict)
            and isinstance(row.get("strategy"), str)
            and type(row.get("num_bytes")) is int
            and type(row.get("seconds")) in (int, float)
            and 1 <= row["num_bytes"] < 1 << 63
            and _MIN_SECONDS <= row["seconds"] <= MAX_SECONDS
        ):
            return (
                "exchanges must each have a strategy, num_bytes of 1 to 2^63 and seconds of "
                f"{_MIN_SECONDS:g} to {MAX_SECONDS:,}, got {reprlib.repr(row)}"
            )
    machines = _machines(content)
    if not isinstance(machines, list) or len(machines) not in (0, len(nodes)):
        return f"machines must be a list of none or {len(nodes)}, got {reprlib.repr(machines)}"
    for row in machines:
        if not (
            isinstance(row, dict)
            and isinstance(row.get("host"), str)
            and all(type(row.get(name)) in (int, float) for name in _RATES)
            and all(1 <= row[name] <= _MAX_RATE for name in _RATES)
            and type(row.get("layer")) in (int, float)
            and 0 <= row["layer"] <= MAX_SECONDS
        ):
            return (
                f"machines must each have a host, {', '.join(_RATES)} of 1 to {_MAX_RATE:g}, and "
                f"layer, seconds of 0 to {MAX_SECONDS:,}, got {reprlib.repr(row)}"
            )
    return ""


def measured_costs() -> CostTable | None:
    """The table in the file that TREE_ATTENTION_COSTS names, if it names one."""
    path = os.environ.get(COSTS_VARIABLE)
    try:
        return CostTable.load(path) if path else None
    except ValueError as error:
        requirement = "unset or name a file that calibrate wrote"
        raise VariableError(COSTS_VARIABLE, requirement, str(error)) from error


@dataclass(frozen=True)
class Choice:
    """The strategy that "auto" takes, and the row of a table that decided."""

    strategy: str
    reason: str


def choose(
    layout: StateLayout,
    topology: Topology,
    backend: str,
    *,
    head_sharded: bool = False,
    costs: CostTable | None = None,
    unavailable: Mapping[str, str] | None = None,
) -> Choice:
    """The canonical strategy for a state, among those that can do what is asked for."""
    able = candidates(layout.dtype, head_sharded, unavailable or {})
    names = [name for name in able if STRATEGIES[name].is_canonical]
    num_bytes = layout.num_bytes
    if len(names) == 1:
        return Choice(names[0], "the only strategy that can do it")
    if costs is not None and costs.covers(backend, topology):
        times = {name: costs.seconds(name, num_bytes) for name in names}
        known = {name: seconds for name, seconds in times.items() if seconds is not None}
        if known:
            order = sorted(known, key=known.__getitem__)
            row = ", ".join(f"{name} {1e6 * known[name]:,.0f} us" for name in order)
            return Choice(order[0], f"measured on these ranks: {row}")
    for rule in RULES:
        if rule.strategy in names and rule.applies(backend, topology, num_bytes):
            return Choice(rule.strategy, f"shipped rule: {rule}")
    return Choice(names[0], "no shipped rule applies")
