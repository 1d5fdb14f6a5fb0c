# SPDX-License-Identifier: BSD-3-Clause
"""What traffic costs on a machine: a linear model whose constants are shipped or measured.

    seconds = sum over the fields of Costs of cost * count in Traffic

Where whole exchanges were measured on the same ranks, their times correct it. A pure function of
numbers that all ranks share, so all ranks decide alike.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .measured import MeasuredExchange, MeasuredExchanges
from .strategies import candidates
from .traffic import Case, Traffic, traffic

# A file that `python -m tree_attention calibrate` wrote.
COSTS_VARIABLE = "TREE_ATTENTION_COSTS"
# Constants are worth nothing for other counts than those they were fitted to.
FORMAT = 2


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

    def predict(self, strategy: str, case: Case) -> float:
        """Seconds of an exchange."""
        return self.seconds(traffic(strategy, case))

    def are_measured(self, strategy: str, case: Case) -> bool:
        """Whether `predict` knows more than constants."""
        return False

    @property
    def digest(self) -> str:
        """Equal for equal constants; short enough for an error message."""
        return _digest(self)

    def save(self, path: str | Path, **remarks: object) -> None:
        """`remarks` say where the constants come from."""
        content = {"format": FORMAT, "seconds_per": asdict(self), **remarks}
        Path(path).write_text(json.dumps(content, indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> Costs:
        """
        Raises:
            ValueError: the file is none that `save` wrote.
        """
        return _load(path).costs


@dataclass(frozen=True)
class Calibration:
    """Measured constants, and the exchanges that were measured with them."""

    costs: Costs
    measured: MeasuredExchanges | None = None

    def predict(self, strategy: str, case: Case) -> float:
        """Seconds of an exchange."""
        seconds = self.costs.predict(strategy, case)
        if self.measured is not None and self.measured.cover(strategy, case):
            seconds *= self.measured.correction(strategy, case, self.costs.predict)
        return seconds

    def are_measured(self, strategy: str, case: Case) -> bool:
        """Whether `predict` knows more than constants."""
        return self.measured is not None and self.measured.cover(strategy, case)

    @property
    def digest(self) -> str:
        """Equal for equal constants and measurements."""
        return _digest(self)

    def save(self, path: str | Path, **remarks: object) -> None:
        """`remarks` say where all this comes from."""
        self.costs.save(path, measured=self.measured and asdict(self.measured), **remarks)

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """What `save` wrote, or `Costs.save`, which knows of no measured exchanges.

        Raises:
            ValueError: the file is none of these.
        """
        return _load(path)


# What "auto" may go by.
CostModel = Costs | Calibration


def _digest(costs: CostModel) -> str:
    return hashlib.sha256(repr(costs).encode()).hexdigest()[:12]


def _load(path: str | Path) -> Calibration:
    try:
        content = json.loads(Path(path).read_text())
        constants = content["seconds_per"]
        costs = Costs(**{name: float(value) for name, value in constants.items()})
        found = content.get("measured")
        measured = None if found is None else _measured(found)
    except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no exchange costs: {error!r}") from error
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} holds no exchange costs of this version, which counts other things; "
            "calibrate again"
        )
    times = [] if measured is None else [exchange.seconds for exchange in measured.exchanges]
    if not all(0 <= value < float("inf") for value in (*asdict(costs).values(), *times)):
        raise ValueError(f"{path} holds no exchange costs: not finite, or negative")
    return Calibration(costs, measured)


def _measured(content: Mapping[str, Any]) -> MeasuredExchanges:
    exchanges = tuple(
        MeasuredExchange(
            str(one["strategy"]),
            int(one["num_rows"]),
            int(one["head_dim"]),
            float(one["seconds"]),
        )
        for one in content["exchanges"]
    )
    return MeasuredExchanges(str(content["backend"]), tuple(map(int, content["nodes"])), exchanges)


@dataclass(frozen=True)
class LinkType:
    """Seconds of one trip of a small message, and of each further byte."""

    step: float
    byte: float


_US, _GB = 1e-6, 1e9
LINK_TYPES = {
    # NVLink 4 and InfiniBand NDR, a NIC per GPU: NCCL's own tuning constants (LL protocol).
    "nvlink": LinkType(0.6 * _US, 1 / (360 * _GB)),
    "infiniband": LinkType(3.7 * _US, 1 / (46 * _GB)),
    # TCP, software included: measured; and an idle 10 Gb/s network.
    "loopback": LinkType(25.0 * _US, 1 / (1.0 * _GB)),
    "ethernet": LinkType(50.0 * _US, 1 / (1.1 * _GB)),
}


def shipped_costs(inside: LinkType, between: LinkType, **software: float) -> Costs:
    """Constants of the links inside a node and between nodes, and of the software."""
    return Costs(
        steps_inside=inside.step,
        bytes_inside=inside.byte,
        steps_between=between.step,
        bytes_between=between.byte,
        **software,
    )


DEFAULT_COSTS = {
    # Launches of a few microseconds, merges at the speed of device memory.
    "nccl": shipped_costs(
        LINK_TYPES["nvlink"],
        LINK_TYPES["infiniband"],
        exchanges=5.0 * _US,
        collectives=6.6 * _US,
        messages=0.3 * _US,
        local_operations=3.0 * _US,
        local_bytes=1 / (2000 * _GB),
    ),
    "gloo": shipped_costs(
        LINK_TYPES["loopback"],
        LINK_TYPES["ethernet"],
        exchanges=50.0 * _US,
        collectives=60.0 * _US,
        messages=15.0 * _US,
        local_operations=5.0 * _US,
        local_bytes=1 / (5.0 * _GB),
    ),
}


def measured_costs() -> Calibration | None:
    """What the file holds that TREE_ATTENTION_COSTS names."""
    path = os.environ.get(COSTS_VARIABLE)
    return Calibration.load(path) if path else None


def default_costs(backend: str) -> Costs:
    return DEFAULT_COSTS.get(backend, DEFAULT_COSTS["gloo"])


def costs_for(backend: str, given: CostModel | None) -> CostModel:
    """`given`, unless there is nothing or it was measured over another backend."""
    if given is None:
        return default_costs(backend)
    measured = given.measured if isinstance(given, Calibration) else None
    return given if measured is None or measured.backend == backend else default_costs(backend)


@functools.lru_cache(maxsize=1024)
def predict(case: Case, costs: CostModel, names: tuple[str, ...]) -> dict[str, float]:
    """Seconds that each strategy would take."""
    return {name: costs.predict(name, case) for name in names}


def choose(case: Case, costs: CostModel, unavailable: Container[str] | None = None) -> str:
    """The canonical strategy that is predicted to be fastest; the first of equals."""
    names = candidates(case.message.dtype, case.head_sharded, True, unavailable)
    times = predict(case, costs, names)
    return min(times, key=times.__getitem__)


def explain(
    case: Case, costs: CostModel, chosen: str, unavailable: Container[str] | None = None
) -> str:
    """A table of what was predicted, fastest first, for a person to read."""
    options = case.message.dtype, case.head_sharded
    names = (*candidates(*options), *candidates(*options, unavailable=unavailable))
    times = predict(case, costs, tuple(dict.fromkeys(names)))
    message = case.message
    rows = [
        f"exchange of {message.num_rows} rows of {message.head_dim} ({message.num_bytes:,} bytes) "
        f"over {case.topology.world_size} ranks, {case.topology}:"
    ]
    for name in sorted(times, key=times.__getitem__):
        sent = traffic(name, case).bytes_sent
        source = "measured" if costs.are_measured(name, case) else "modelled"
        mark = "<-" if name == chosen else "not available" if name in (unavailable or ()) else ""
        row = f"  {name:<16} {1e6 * times[name]:>12,.1f} us {source} {sent:>14,} bytes sent  {mark}"
        rows.append(row.rstrip())
    return "\n".join(rows)
