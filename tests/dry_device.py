# SPDX-License-Identifier: BSD-3-Clause
"""A dry run, on any machine, of tests that are for a GPU, so that none is first run on a GPU.

Within `dry_cuda` tensors of "cuda" are those of `fake_device`, and the operators on them are the
CUDA kernels on the emulated device. Graphs record operations and replay them. Streams are names,
and memory is without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fake_device
from distributed import run_ranks
from emulated import emulated_operators

# A problem of a GPU's size takes the emulated device this many times too long.
SHRINK = 256


def sized(number: int) -> int:
    """A number of keys or of repetitions for a GPU; in a dry run a small part of it."""
    return number if torch.cuda.is_available() else max(2, number // SHRINK)


class Graph:
    """Operations that run during the capture, are undone at its end, and run again in replays."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self.changed: list[tuple[Tensor, Tensor]] = []  # by the capture, and what it was before

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.changed.append((value, value.clone()))
        result = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, result))
        return result

    def undo(self) -> None:
        while self.changed:
            tensor, before = self.changed.pop()
            tensor.copy_(before)

    def replay(self) -> None:
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.operations = []


@contextmanager
def graph(captured: Graph, **_: Any) -> Iterator[None]:
    with mock.patch.object(fake_device, "call", captured.call):
        yield
    captured.undo()


class Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def nothing(self, *_: Any) -> None:
        pass

    wait_stream = synchronize = nothing

    def query(self) -> bool:
        return True

    def record_event(self) -> fake_device.Event:
        return fake_device.Event()


def set_sync_debug_mode(mode: str | int) -> None:
    fake_device.host_may_wait = mode in ("default", 0)


@contextmanager
def dry_cuda(seed: int = 0) -> Iterator[None]:
    nothing = Stream().nothing
    properties = SimpleNamespace(multi_processor_count=3)
    with ExitStack() as stack:
        stack.enter_context(fake_device.fake_cuda())
        stack.enter_context(emulated_operators(seed))
        for name, value in {
            "CUDAGraph": Graph, "graph": graph, "Stream": Stream, "stream": lambda _: nullcontext(),
            "current_stream": Stream, "synchronize": nothing, "empty_cache": nothing,
            "mem_get_info": lambda *_: (1 << 40, 1 << 40),
            "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": set_sync_debug_mode,
            "get_device_properties": lambda _: properties,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", lambda _: True))
        yield


def run_ranks_dry(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks`, on whose ranks the device is fake too."""
    return run_ranks(_call, world_size, fn, args, "lost" in options, **options)


def _call(rank: int, world_size: int, fn: Any, args: tuple[Any, ...], loses_ranks: bool) -> Any:
    with dry_cuda(rank):
        result = fn(rank, world_size, *args)
        if not loses_ranks:
            leave_device()
        return result


def leave_device() -> None:
    """Makes the group's last call one on the host, as a rank that changes its call repeats it, and
    other tests have no such device."""
    from tree_attention.exchange import get_communicator

    get_communicator().all_reduce(torch.zeros(1))
