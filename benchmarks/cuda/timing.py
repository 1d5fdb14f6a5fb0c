# SPDX-License-Identifier: BSD-3-Clause
"""Timing on the GPU: interleaved replays of captured graphs, and single eager calls."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..harness.measure import Samples

ROUNDS = 50
# What is slow gets fewer samples, so that no case takes minutes; never fewer than these.
MIN_ROUNDS = 5
# One replay takes at least this long, beside which the events' microseconds do not count.
REPLAY_SECONDS = 1e-3
# Two milliseconds or so, in which the host queues what is timed then.
QUEUE_CYCLES = 4_000_000

# Computes with the i-th input set; returns o, or a tuple that begins with o.
Call = Callable[[int], Any]


@dataclass
class Measured:
    """Samples of one implementation; `graph.result` is what its last replay wrote into memory
    that was NaN before."""

    graph: Samples
    eager: Samples


@dataclass
class Measurement:
    measured: dict[str, Measured] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # name -> reason


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    calls: int
    result: Any


def measure(calls: Mapping[str, Call], num_sets: int, seconds: float) -> Measurement:
    """Times all calls in turn, each `ROUNDS` times or for about `seconds`.

    Graph: a replay of back-to-back calls, which rotate over the sets, divided by their number.
    Eager: one call on an idle device, between two events; a tenth of the time. What cannot run or
    cannot be captured is left out, with the reason.
    """
    result = Measurement()
    captured: dict[str, _Captured] = {}
    stream = torch.cuda.Stream()
    # Events and graphs of one stream: work that is queued ahead keeps the device busy, so that the
    # time between two events holds none of the host's.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            try:
                captured[name] = _capture(call, num_sets, stream)
            except Exception as error:
                check_device(name)
                result.failed[name] = reason(error)
        graph_samples = _time_graphs(captured, seconds)
        capturable = {name: calls[name] for name in captured}
        eager_samples = _time_eager(capturable, num_sets, seconds / 10)
        for name, one in captured.items():
            for output in _tensors(one.result):
                output.fill_(math.nan)
            one.graph.replay()
            result.measured[name] = Measured(
                Samples(graph_samples[name], one.result), Samples(eager_samples[name])
            )
        stream.synchronize()
    # The results live in the memory of their graphs.
    for name, one in captured.items():
        copies = [output.clone() for output in _tensors(one.result)]
        result.measured[name].graph = Samples(graph_samples[name], tuple(copies))
    return result


class DeviceLost(RuntimeError):
    """Every later call on the device fails as well, as after an illegal access."""


def check_device(name: str) -> None:
    """Wait for the calls of `name`; raises DeviceLost if they were the device's last."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"{name} lost the device: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The first line of the error that caused it: a failed capture raises another one on top."""
    while error.__context__ is not None and not isinstance(error, DeviceLost):
        error = error.__context__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:150]}"


def _tensors(result: Any) -> list[Tensor]:
    values = result if isinstance(result, tuple | list) else (result,)
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def _capture(call: Call, num_sets: int, stream: torch.cuda.Stream) -> _Captured:
    for i in range(3):  # compiles, loads modules, allocates workspaces
        call(i % num_sets)
    begin, end = _event(), _event()
    torch.cuda._sleep(QUEUE_CYCLES)
    begin.record()
    for i in range(3):
        call(i % num_sets)
    end.record()
    stream.synchronize()
    seconds = begin.elapsed_time(end) / 3e3
    count = num_sets * max(1, math.ceil(REPLAY_SECONDS / (num_sets * seconds)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(count):
            result = call(i % num_sets)
    graph.replay()
    stream.synchronize()
    return _Captured(graph, count, result)


def _time_graphs(captured: Mapping[str, _Captured], seconds: float) -> dict[str, list[float]]:
    first = {name: _between(one.graph.replay) for name, one in captured.items()}
    every = {name: _stride(time, seconds) for name, time in first.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in captured}
    torch.cuda._sleep(QUEUE_CYCLES)
    for i in range(ROUNDS):
        for name, one in captured.items():
            if i % every[name] == 0:
                begin, end = _event(), _event()
                begin.record()
                one.graph.replay()
                end.record()
                events[name].append((begin, end))
    torch.cuda.current_stream().synchronize()
    return {
        name: [begin.elapsed_time(end) / 1e3 / captured[name].calls for begin, end in pairs]
        for name, pairs in events.items()
    }


def _time_eager(calls: Mapping[str, Call], num_sets: int, seconds: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    every: dict[str, int] = {}
    count = 0
    for i in range(ROUNDS):
        for name, call in calls.items():
            if i % every.get(name, 1) == 0:
                count += 1
                time = _between(partial(call, count % num_sets))
                every.setdefault(name, _stride(time, seconds))
                samples[name].append(time)
    return samples


def _between(run: Callable[[], Any]) -> float:
    """Seconds of the device from an idle start to the end of what `run` queues."""
    stream = torch.cuda.current_stream()
    begin, end = _event(), _event()
    stream.synchronize()
    begin.record()
    run()
    end.record()
    stream.synchronize()
    return begin.elapsed_time(end) / 1e3


def _stride(time: float, seconds: float) -> int:
    """So that every so-manieth of ROUNDS takes about `seconds` in all."""
    return min(ROUNDS // MIN_ROUNDS, max(1, math.ceil(ROUNDS * time / seconds)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
