# SPDX-License-Identifier: BSD-3-Clause
"""The time that a fake device and its host would take, at once or one after the other.

    with fake_cuda(), Timeline(device=..., host=..., bus=...) as timeline:
        model(token)
    timeline.elapsed

Attention takes the time of reading its keys, on the host at once and on the device in the order of
its stream. A copy takes the time of its bytes and a latency, in the order of its stream. The host
waits for a copy that is asked to be over, for one from memory that is not page-locked, for a value,
and for an event. All other operations take no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fake_device
from fake_device import DeviceTensor, aten
from tree_attention.hf.cache import far

LATENCY = 10e-6  # of a copy, in seconds


class Event(fake_device.Event):
    def __init__(self, timeline: Timeline, end: float) -> None:
        super().__init__()
        self.timeline, self.end = timeline, end

    def synchronize(self) -> None:
        self.timeline.host = max(self.timeline.host, self.end)
        super().synchronize()


class Stream(fake_device.Stream):
    """Operations of the device, one after the other."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.end = timeline, 0.0

    def wait_stream(self, other: fake_device.Stream) -> None:
        assert isinstance(other, Stream)
        self.end = max(self.end, other.end)

    def record_event(self) -> Event:
        return Event(self.timeline, self.end)

    def take(self, seconds: float) -> None:
        self.end = max(self.end, self.timeline.host) + seconds


class Timeline:
    """Bytes per second of the device's memory, of the host's, and of the bus between them."""

    def __init__(self, device: float, host: float, bus: float) -> None:
        self.rates = {"device": device, "host": host, "bus": bus}
        self.host = 0.0  # the time at which the host is
        self.busy = {"device": 0.0, "host": 0.0, "bus": 0.0}  # seconds of attention, and of copies
        self.stream = self.usual = Stream(self)
        self.side = Stream(self)  # on which keys leave the device
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._stack = ExitStack()

    @property
    def elapsed(self) -> float:
        """The time at which the host and the usual stream have done all."""
        return max(self.host, self.usual.end)

    def __enter__(self) -> Timeline:
        run = fake_device.run

        def timed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            result = run(function, args, kwargs)
            self._note(function, args, kwargs, result)
            return result

        @contextmanager
        def current(stream: Stream) -> Iterator[None]:
            before, self.stream = self.stream, stream
            yield
            self.stream = before

        for owner, name, value in (
            (fake_device, "run", timed),
            (torch.cuda, "current_stream", lambda *_: self.stream),
            (torch.cuda, "stream", current),
            (far, "_stream", lambda _: self.side),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, value))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _note(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if kwargs.get("pin_memory"):
            storage = result.untyped_storage()
            self._pinned[storage.data_ptr()] = storage  # kept, so that no other has its address
        crossing = fake_device.crossing(function, args, kwargs.get("device"))
        if crossing is not None:
            way, value = crossing
            self._spend("bus", value.nbytes, self.stream, LATENCY)
            is_late = fake_device.is_asynchronous(function, args, kwargs)
            if not is_late or (way == "to device" and not self._is_pinned(value)):
                self.host = max(self.host, self.stream.end)
        elif function.name().startswith("tree_attention::lean_decode"):
            on_device = any(isinstance(x, DeviceTensor) for x in tree_leaves(args))
            where = "device" if on_device else "host"
            self._spend(where, key_bytes(*args[1:4], kwargs.get("page_table")), self.stream)
        elif function is aten._local_scalar_dense.default and isinstance(args[0], DeviceTensor):
            self.host = max(self.host, self.stream.end)

    def _spend(self, what: str, num_bytes: int, stream: Stream, latency: float = 0.0) -> None:
        seconds = num_bytes / self.rates[what] + latency
        if stream is self.usual:
            self.busy[what] += seconds
        if what == "host":
            self.host += seconds
        else:
            stream.take(seconds)

    def _is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._pinned


def key_bytes(k: Tensor, v: Tensor, ranges: Tensor | None, page_table: Tensor | None) -> int:
    """The bytes of keys and values in the ranges of all queries, each query's for itself."""
    assert ranges is not None
    own = ranges.host if isinstance(ranges, DeviceTensor) else ranges
    number = k.shape[2] * (1 if page_table is None else page_table.shape[1])
    lengths = own.clamp(0, number).diff(dim=-1).clamp_min(0)
    return int(lengths.sum()) * k.shape[1] * (k.shape[3] + v.shape[3]) * k.itemsize
