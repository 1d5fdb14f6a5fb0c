# SPDX-License-Identifier: BSD-3-Clause
"""Predictions beside what was measured on emulated clusters.

The file is JSON with a list `rows`, each of one way in one configuration:

    {"link": "metro", "world": 8, "batch": 16, "strategy": "all_gather", "seconds": 0.0123,
     "keys": 64, "seconds_per_key": 0.0}

`link` names a cluster of `CLUSTERS`. `seconds` may be a list of calls, of which the median counts.
`keys` (of a rank and sequence) and `seconds_per_key` (of its attention) are 0 if absent. Rows may
also hold several ways, as those of `benchmarks/bench_cluster.py` do: `world_size`, and `ways` as
{"all_gather": {"seconds": [...]}, ...}; `only_predicted` ones, without times, are passed over.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .clusters import CLUSTERS, Cluster
from .fabric import Floats, Relay
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
    if row.get("only_predicted"):
        return
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

    processors: int | None  # that all ranks share
    exchange: float  # seconds per call of ours
    call: float  # per collective
    post: float  # per message that is sent by itself, of the sender and of the receiver
    message: float  # per message at all, of either
    operation: float  # per kernel or copy
    packet: float  # of the relay, see `Relay`
    wake_up: float

    def __str__(self) -> str:
        constants = {name: value for name, value in vars(self).items() if name != "processors"}
        return ", ".join(f"{name} {1e6 * value:,.1f} us" for name, value in constants.items())

    def on(self, cluster: Cluster) -> Cluster:
        networks = tuple(
            replace(
                network,
                call=self.call,
                post=self.post,
                receive=self.message,
                relay=Relay(self.packet, self.wake_up),
                levels=tuple(replace(level, overhead=self.message) for level in network.levels),
            )
            for network in cluster.networks
        )
        return replace(
            cluster,
            networks=networks,
            exchange=self.exchange,
            local_operation=self.operation,
            processors=self.processors,
        )


# Where the search begins: what Python, a system call and a packet take on a machine of today.
_PRIOR = 0.02  # of a squared logarithm; an error of a row counts 1
_GUESS = Software(None, 200e-6, 100e-6, 50e-6, 50e-6, 20e-6, 8e-6, 8e-6)


def fit(rows: Sequence[Measured], processors: int | None) -> Software:
    """The constants with about the least mean error of `rows`.

    Levenberg and Marquardt's least squares of logarithms, weighted so that outliers count linearly.
    """

    def software(logarithms: Floats) -> Software:
        return Software(processors, *np.exp(logarithms).tolist())

    def residuals(logarithms: Floats) -> Floats:
        constants = software(logarithms)
        return np.array([math.log(predict(row, constants).seconds / row.seconds) for row in rows])

    guess = np.log(astuple(_GUESS)[1:])
    # A constant that rows say nothing about stays as guessed; weak beside 24 rows of each.

    def loss(errors: Floats, logarithms: Floats) -> float:
        return float(np.abs(errors).sum() + _PRIOR * ((logarithms - guess) ** 2).sum())

    best, damping, step = guess, 1.0, 0.1
    of_best = residuals(best)
    while damping < 1e3:
        changes = np.eye(len(best)) * step
        slopes = np.array([residuals(best + change) - of_best for change in changes]).T / step
        weights = 1 / np.maximum(np.abs(of_best), 0.05)
        normal = (slopes.T * weights) @ slopes + (2 * _PRIOR + damping) * np.eye(len(best))
        downhill = -(slopes.T * weights) @ of_best - 2 * _PRIOR * (best - guess)
        candidate = best + np.clip(np.linalg.solve(normal, downhill), -1, 1)
        moved = residuals(candidate)
        if loss(moved, candidate) < 0.999 * loss(of_best, best):
            best, of_best, damping = candidate, moved, damping / 3
        else:
            damping *= 10
    return software(best)


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
