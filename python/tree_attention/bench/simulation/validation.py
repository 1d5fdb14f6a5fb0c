# SPDX-License-Identifier: BSD-3-Clause
"""Predictions beside what was measured on emulated clusters.

The file is JSON with a list `rows`, each of one way in one configuration:

    {"link": "metro", "world": 8, "batch": 16, "strategy": "all_gather", "seconds": 0.0123,
     "keys": 64, "seconds_per_key": 0.0}

`link` names a cluster of `CLUSTERS`. `seconds` may be a list of calls, of which the median counts.
`keys` (of a rank and sequence) and `seconds_per_key` (of its attention) are 0 if absent. Rows may
also hold several ways, as those of `benchmarks/bench_cluster.py` do: `world_size`, and `ways` as
{"all_gather": {"seconds": [...]}, ...}.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .clusters import CLUSTERS, Cluster
from .programs import Problem, simulate, ways


@dataclass(frozen=True)
class Measured:
    """One way of decoding on an emulated cluster."""

    link: str
    world: int
    batch: int
    strategy: str
    seconds: float
    keys: int = 0
    seconds_per_key: float = 0.0

    @property
    def configuration(self) -> str:
        return f"{self.link}/{self.world}"


@dataclass(frozen=True)
class Prediction:
    """What was measured and what is simulated."""

    measured: Measured
    seconds: float

    @property
    def error(self) -> float:
        """Relative; positive where the simulation is slower than the measurement."""
        return self.seconds / self.measured.seconds - 1


def read(path: str | Path) -> list[Measured]:
    """
    Raises:
        ValueError: the file has no rows of the form above.
    """
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        result = [measured for row in rows for measured in _flat(row)]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no measured rows: {error!r}") from error
    if not result:
        raise ValueError(f"{path} holds no measured rows: the list is empty")
    for measured in result:
        if measured.link not in CLUSTERS:
            raise ValueError(f"{path}: no cluster is called {measured.link!r}")
        if measured.strategy not in ways():
            raise ValueError(f"{path}: no strategy or ring is called {measured.strategy!r}")
        if not measured.seconds > 0 or measured.world < 2:
            raise ValueError(f"{path}: times are positive and of several ranks, got {measured}")
    return result


def _flat(row: dict[str, Any]) -> Iterator[Measured]:
    if "ways" in row:
        of_row = {"world": row["world_size"], **row}
        for name, way in row["ways"].items():
            if name == "auto":  # which is one of the others
                continue
            yield from _flat({**_without_ways(of_row), "strategy": name, "seconds": way["seconds"]})
        return
    seconds = row["seconds"]
    yield Measured(
        row["link"],
        int(row["world"]),
        int(row["batch"]),
        row["strategy"],
        float(statistics.median(seconds) if isinstance(seconds, list) else seconds),
        int(row.get("keys", 0)),
        float(row.get("seconds_per_key", 0.0)),
    )


def _without_ways(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "ways"}


@dataclass(frozen=True)
class Software:
    """What an emulated cluster's processors take: no property of its links."""

    exchange: float  # seconds per call of ours
    call: float  # seconds per collective
    message: float  # seconds per message
    relay: float  # bytes per second of all hosts together
    processors: int | None = None  # that all ranks share

    def on(self, cluster: Cluster) -> Cluster:
        networks = tuple(
            replace(
                network,
                call=self.call,
                relay=self.relay,
                levels=tuple(replace(level, overhead=self.message) for level in network.levels),
            )
            for network in cluster.networks
        )
        return replace(
            cluster, networks=networks, exchange=self.exchange, processors=self.processors
        )


def fit(rows: Sequence[Measured], processors: int | None) -> Software:
    """The constants with the least mean error of `rows`, by a search from coarse to fine."""
    best = Software(100e-6, 100e-6, 30e-6, 1e9, processors)

    def loss(software: Software) -> float:
        errors = (math.log(predict(row, software).seconds / row.seconds) for row in rows)
        return statistics.mean(map(abs, errors))

    least = loss(best)
    for factor in (4.0, 2.0, 1.3):
        improved = True
        while improved:
            improved = False
            for name in ("message", "relay", "call", "exchange"):
                for change in (factor, 1 / factor):
                    candidate = replace(best, **{name: change * getattr(best, name)})
                    error = loss(candidate)
                    if error < least * (1 - 1e-6):
                        best, least, improved = candidate, error, True
    return best


def predict(measured: Measured, software: Software | None = None) -> Prediction:
    """`software`: instead of the named cluster's constants."""
    problem = Problem(measured.keys, measured.batch)
    attention = measured.seconds_per_key * measured.keys * measured.batch
    named = CLUSTERS[measured.link]
    cluster = replace(
        named if software is None else software.on(named),
        key_bandwidth=problem.kv_bytes / attention if attention else float("inf"),
    )
    run = simulate(measured.strategy, problem, cluster, measured.world)
    return Prediction(measured, run.seconds)


def median_error(predictions: Sequence[Prediction]) -> float:
    """The median of the errors' magnitudes."""
    return statistics.median(abs(prediction.error) for prediction in predictions)
