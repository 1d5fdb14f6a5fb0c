# SPDX-License-Identifier: BSD-3-Clause
"""Graph and eager timing on a simulated device, whose clock advances by what its calls cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cuda import timing

LAUNCH = 20e-6  # what the host needs to queue one eager call


class Device:
    """One stream. Eager work advances the clock by its cost and the host's; captured calls are
    kept, and a replay costs what they cost without the host."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.capturing: list[Callable[[], None]] | None = None
        self.order: list[tuple[str, int]] = []

    def work(self, name: str, index: int, cost: float, effect: Callable[[], None]) -> None:
        def run() -> None:
            self.clock += cost
            self.order.append((name, index))
            effect()

        if self.capturing is not None:
            self.capturing.append(run)
        else:
            self.clock += LAUNCH
            run()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = simulated.clock

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end.time - self.time)

    class Stream:
        def wait_stream(self, other: "Stream") -> None: ...
        def synchronize(self) -> None: ...

    class Graph:
        def replay(self) -> None:
            for run in self.calls:
                run()

    @contextmanager
    def capture(graph: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        simulated.capturing = []
        try:
            yield
        finally:
            graph.calls, simulated.capturing = simulated.capturing, None

    @contextmanager
    def stream_context(stream: Stream) -> Iterator[None]:
        yield

    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capture,
        "stream": stream_context,
        "current_stream": Stream,
        "_sleep": lambda cycles: None,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return simulated


def kernel(device: Device, name: str, cost: float, value: float = 1.0) -> timing.Call:
    """Writes `value` into one output, as a captured kernel always writes into the same memory."""
    o = torch.empty(3)

    def call(i: int) -> Tensor:
        device.work(name, i, cost, lambda: o.fill_(value))
        return o

    return call


def test_graph_times_are_without_the_host(device: Device) -> None:
    calls = {"a": kernel(device, "a", 5e-6), "b": kernel(device, "b", 300e-6, 2.0)}
    result = timing.measure(calls, 4, seconds=10.0)
    assert not result.failed
    a, b = result.measured["a"], result.measured["b"]
    assert a.graph.median == pytest.approx(5e-6) and b.graph.median == pytest.approx(300e-6)
    assert a.eager.median == pytest.approx(5e-6 + LAUNCH)
    assert len(a.graph.seconds) == len(b.eager.seconds) == timing.ROUNDS >= 50
    assert a.graph.result[0].tolist() == [1.0] * 3 and b.graph.result[0].tolist() == [2.0] * 3


def test_calls_rotate_over_all_sets_and_alternate(device: Device) -> None:
    calls = {name: kernel(device, name, 100e-6) for name in "ab"}
    timing.measure(calls, 3, seconds=10.0)
    runs = [(n, [i for _, i in run]) for n, run in groupby(device.order, lambda call: call[0])]
    # A replay takes at least REPLAY_SECONDS: three rounds over three sets of 120 us, host included.
    replays = [n for n, indices in runs if indices == [0, 1, 2] * 3]
    assert len(replays) >= 2 * timing.ROUNDS
    assert replays[:10] == ["a", "b"] * 5


def test_unwritten_output_shows(device: Device) -> None:
    o = torch.ones(3)

    def writes_some(i: int) -> Tensor:
        device.work("a", i, 1e-3, lambda: o[:2].fill_(1.0))
        return o

    (written,) = timing.measure({"a": writes_some}, 1, 1.0).measured["a"].graph.result
    assert written[:2].tolist() == [1.0, 1.0] and written[2].isnan()


def test_slow_calls_get_fewer_samples(device: Device) -> None:
    calls = {"quick": kernel(device, "quick", 1e-3), "slow": kernel(device, "slow", 1.0)}
    measured = timing.measure(calls, 1, seconds=0.5).measured
    assert len(measured["quick"].graph.seconds) == timing.ROUNDS
    assert len(measured["slow"].graph.seconds) == timing.MIN_ROUNDS
    assert len(measured["slow"].eager.seconds) == timing.MIN_ROUNDS


def test_what_fails_is_left_out_with_its_reason(device: Device) -> None:
    def fails(i: int) -> Tensor:
        raise RuntimeError("no kernel for this shape")

    def not_captured(i: int) -> Tensor:
        if device.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.empty(1)

    def takes_time(i: int) -> Tensor:
        device.clock += 1e-3
        return not_captured(i)

    calls = {"fails": fails, "capture": takes_time, "right": kernel(device, "right", 1e-3)}
    result = timing.measure(calls, 2, 1.0)
    assert set(result.measured) == {"right"}
    assert result.failed["fails"] == "RuntimeError: no kernel for this shape"
    assert "not permitted when stream is capturing" in result.failed["capture"]


def test_a_lost_device_is_no_failed_peer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(i: int) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def sticky() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", sticky)
    with pytest.raises(timing.DeviceLost, match=r"fails lost the device: .*illegal memory") as lost:
        timing.measure({"right": kernel(device, "right", 1e-3), "fails": fails}, 1, 1.0)
    assert timing.reason(lost.value).startswith("DeviceLost: fails lost the device: RuntimeError")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_device() -> None:
    x = torch.randn(1 << 24, device="cuda")
    result = timing.measure({"sum": lambda i: x.sum(), "half": lambda i: x[: 1 << 23].sum()}, 1, 1)
    assert not result.failed
    (total,) = result.measured["sum"].graph.result
    torch.testing.assert_close(total, x.sum())
    assert result.measured["half"].graph.median < result.measured["sum"].graph.median
