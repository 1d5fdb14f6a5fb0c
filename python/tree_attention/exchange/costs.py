# SPDX-License-Identifier: BSD-3-Clause
"""What traffic costs on a machine: a linear model whose constants are shipped or measured.

    seconds = sum over the fields of Costs of cost * count in Traffic

A pure function of numbers that all ranks share, so all ranks decide alike.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Container
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .strategies import candidates
from .traffic import Case, Traffic, traffic

# A file that `python -m tree_attention calibrate` wrote.
COSTS_VARIABLE = "TREE_ATTENTION_COSTS"


@dataclass(frozen=True)
class Costs:
    """Seconds for one of each count of `Traffic`."""

    exchanges: float
    collectives: float
    messages: float
    steps_inside: float
    bytes_inside: float
    steps_between: float
    bytes_between: float
    local_operations: float
    local_bytes: float

    def seconds(self, work: Traffic) -> float:
        return sum(getattr(self, field.name) * getattr(work, field.name) for field in fields(self))

    @property
    def digest(self) -> str:
        """Equal for equal constants; short enough for an error message."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def save(self, path: str | Path, **remarks: object) -> None:
        """`remarks` say where the constants come from."""
        content = {"seconds_per": asdict(self), **remarks}
        Path(path).write_text(json.dumps(content, indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> Costs:
        """
        Raises:
            ValueError: the file is none that `save` wrote.
        """
        try:
            constants = json.loads(Path(path).read_text())["seconds_per"]
            costs = Costs(**{name: float(value) for name, value in constants.items()})
        except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} holds no exchange costs: {error!r}") from error
        if not all(0 <= value < float("inf") for value in asdict(costs).values()):
            raise ValueError(f"{path} holds no exchange costs: not finite, or negative")
        return costs


# Measured or published times of a step and of a byte per link, and of a library's calls.
_US, _GB = 1e-6, 1e9
DEFAULT_COSTS = {
    # NCCL over NVLink 4 inside a node and InfiniBand NDR between nodes: the constants of NCCL's own
    # tuning (LL protocol), launches of a few microseconds, merges at the speed of device memory.
    "nccl": Costs(
        exchanges=5.0 * _US,
        collectives=6.6 * _US,
        messages=0.3 * _US,
        steps_inside=0.6 * _US,
        bytes_inside=1 / (360 * _GB),
        steps_between=3.7 * _US,
        bytes_between=1 / (46 * _GB),
        local_operations=3.0 * _US,
        local_bytes=1 / (2000 * _GB),
    ),
    # Gloo over the loopback interface and 10 Gb/s Ethernet.
    "gloo": Costs(
        exchanges=50.0 * _US,
        collectives=60.0 * _US,
        messages=15.0 * _US,
        steps_inside=50.0 * _US,
        bytes_inside=1 / (1.0 * _GB),
        steps_between=100.0 * _US,
        bytes_between=1 / (1.1 * _GB),
        local_operations=5.0 * _US,
        local_bytes=1 / (5.0 * _GB),
    ),
}


def measured_costs() -> Costs | None:
    """The constants of the file that TREE_ATTENTION_COSTS names."""
    path = os.environ.get(COSTS_VARIABLE)
    return Costs.load(path) if path else None


def default_costs(backend: str) -> Costs:
    return DEFAULT_COSTS.get(backend, DEFAULT_COSTS["gloo"])


@functools.lru_cache(maxsize=1024)
def predict(case: Case, costs: Costs, names: tuple[str, ...]) -> dict[str, float]:
    """Seconds that each strategy would take."""
    return {name: costs.seconds(traffic(name, case)) for name in names}


def choose(case: Case, costs: Costs, unavailable: Container[str] = ()) -> str:
    """The canonical strategy that is predicted to be fastest; the first of equals."""
    names = candidates(case.message.dtype, case.head_sharded, canonical=True)
    times = predict(case, costs, tuple(name for name in names if name not in unavailable))
    return min(times, key=times.__getitem__)


def explain(case: Case, costs: Costs, chosen: str, unavailable: Container[str] = ()) -> str:
    """A table of what was predicted, fastest first, for a person to read."""
    times = predict(case, costs, candidates(case.message.dtype, case.head_sharded))
    message = case.message
    rows = [
        f"exchange of {message.num_rows} rows of {message.head_dim} ({message.num_bytes:,} bytes) "
        f"over {case.topology.world_size} ranks, {case.topology}:"
    ]
    for name in sorted(times, key=times.__getitem__):
        sent = traffic(name, case).bytes_sent
        mark = "<-" if name == chosen else "not available" if name in unavailable else ""
        row = f"  {name:<16} {1e6 * times[name]:>12,.1f} us {sent:>14,} bytes sent  {mark}"
        rows.append(row.rstrip())
    return "\n".join(rows)
