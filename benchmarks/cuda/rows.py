# SPDX-License-Identifier: BSD-3-Clause
"""One row of the result: measured, judged against float64, as JSON values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor

from tree_attention.reference.accuracy import Accuracy

from ..harness.measure import Samples
from . import read_probe, timing
from .cases import OURS
from .machine import Ceiling
from .peers import SCHEDULES
from .timing import Call

PROBE = "read probe"
# From here on the configuration that is fastest for large buffers is the fastest.
LARGE_BYTES = 512 << 20


class Judge(Protocol):
    def __call__(self, o: Tensor, lse: Tensor | None = None, /) -> Accuracy: ...


def measured_row(
    calls: Mapping[str, Call],
    unavailable: Mapping[str, str],
    spans: Sequence[Tensor],
    *,
    judge: Judge,
    io_bytes: int,
    ceiling: Ceiling,
    seconds: float,
) -> dict[str, Any]:
    """Times the calls beside a kernel that reads the bytes of a span, and judges what they wrote.

    A peer whose result is wrong is no peer; ours makes the row WRONG.
    """
    span_bytes = spans[0].nbytes
    large = span_bytes >= LARGE_BYTES
    configurations = [ceiling.configuration] if large else read_probe.CONFIGURATIONS
    probes = {
        f"{PROBE} {configuration}": call
        for configuration, call in read_probe.candidates(spans, configurations).items()
    }
    measurement = timing.measure({**calls, **probes}, len(spans), seconds)
    if measurement.failed.get(OURS, "").startswith("OutOfMemoryError"):
        raise torch.OutOfMemoryError(measurement.failed[OURS])
    unavailable = {**unavailable, **measurement.failed}
    times: dict[str, Samples] = {}
    eager: dict[str, Samples] = {}
    accuracies: dict[str, Accuracy] = {}
    for name in calls:
        if name not in measurement.measured:
            continue
        measured = measurement.measured[name]
        accuracies[name] = judge(*measured.graph.result[:2])
        if name != OURS and not accuracies[name].right:
            unavailable[name] = f"wrong result (error {accuracies[name].o_error:.1e})"
            continue
        times[name], eager[name] = measured.graph, measured.eager
    probe = min(
        (measurement.measured[name].graph for name in probes if name in measurement.measured),
        key=lambda samples: samples.median,
        default=None,
    )
    row: dict[str, Any] = {
        "io_bytes": io_bytes,
        "read_bytes": span_bytes,
        "sets": len(spans),
        "times": {name: samples.to_json() for name, samples in times.items()},
        "eager": {name: samples.to_json() for name, samples in eager.items()},
        "unavailable": unavailable,
        "accuracy": {name: asdict(accuracy) for name, accuracy in accuracies.items()},
        "wrong": OURS not in accuracies or not accuracies[OURS].right,
    }
    if probe is not None:
        row["times"][PROBE] = probe.to_json()
    if OURS in times:
        row["bandwidth"] = io_bytes / times[OURS].median
        row["ceiling_share"] = row["bandwidth"] / ceiling.read
        if probe is not None:
            row["read_share"] = row["bandwidth"] / (span_bytes / probe.median)
    return row


def best_peer(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest other implementation of a row and its time in microseconds. Our own kernel under
    other schedules is none: those have a target of their own."""
    others = {
        name: times["median_us"]
        for name, times in row["times"].items()
        if name not in (OURS, PROBE, *SCHEDULES)
    }
    return min(others.items(), key=lambda item: item[1]) if others else None


def ratio(row: Mapping[str, Any], name: str) -> float | None:
    """Return the time of this implementation over ours."""
    times = row["times"]
    if name not in times or OURS not in times:
        return None
    quotient: float = times[name]["median_us"] / times[OURS]["median_us"]
    return quotient
