# SPDX-License-Identifier: BSD-3-Clause
"""Memory that the GPUs of a host share: how ranks set it up, and how its errors are reported."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from distributed import on_ranks
from helpers import assert_same_bits
from test_one_shot import CPU, FP32, states
from tree_attention import ExchangeError, merge_states
from tree_attention.exchange import Communicator, Topology
from tree_attention.exchange.agreement.signatures import Note
from tree_attention.exchange.transport import symmetric_memory


class Group(NamedTuple):
    ranks: int = 2

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize(
    "fails, said, reason",
    [
        ("_allocate", {}, "rank 0: allocation: no such memory"),
        ("_rendezvous", {}, "rank 0: rendezvous: no such memory"),
        ("_try_out", {}, "rank 0: test: no such memory"),
        ("", {"test": {"reason": "test: wrong"}}, "rank 1: test: wrong"),
        ("", {"rendezvous": {"reason": "rendezvous: late"}}, "rank 1: rendezvous: late"),
        ("", {"devices": {"reason": "too old"}}, "rank 1: too old"),
        ("", {"devices": {"host": "here", "gpu": "a", "may share": ""}}, "ranks share a GPU"),
        ("", {"devices": {"host": "there", "gpu": "b"}}, "ranks are on 2 hosts"),
        ("", {}, ""),
    ],
)
def test_connecting(fails, said, reason):
    """What one rank cannot do, all do without, and each knows why."""

    def step(name: str) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            if name == fails:
                raise OSError("no such memory\nand a trace")
            return symmetric_memory.SymmetricMemory(0, [0, 0], CPU)

        return run

    def gather(name: str, note: dict[str, str]) -> list[dict[str, str]]:
        name = name.removeprefix("one_shot, ")
        other = {"host": "here", "gpu": "b", "may share": ""}
        return [note, said.get(name, other if name == "devices" else {})]

    with ExitStack() as patches:
        for name in ("_allocate", "_rendezvous", "_try_out"):
            patches.enter_context(mock.patch.object(symmetric_memory, name, step(name)))
        patches.enter_context(mock.patch.object(socket, "gethostname", return_value="here"))
        properties = SimpleNamespace(uuid="a")
        patches.enter_context(
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)
        )
        patches.enter_context(mock.patch.object(torch.cuda, "device", lambda device: nullcontext()))
        found = symmetric_memory.connect(
            Group(), CPU, Topology((0, 0)), "", gather, time.monotonic() + 5.0
        )
    assert found == reason if reason else isinstance(found, symmetric_memory.SymmetricMemory)


def test_connecting_nodes():
    found = symmetric_memory.connect(Group(), CPU, Topology((0, 1)), "", lambda name, note: [], 0.0)
    assert found == "ranks are on 2 nodes"


@pytest.mark.parametrize(
    "offsets, reason",
    [
        ((-8, 8), "the buffer does not begin where the memory does"),
        ((0,), "GPUs do not reach one another's memory"),
        ((0, None), "GPUs do not reach one another's memory"),
        ((0, 8), ""),
    ],
)
def test_memory_as_torch_gives_it(offsets: tuple[int | None, ...], reason: str) -> None:
    buffer, store = torch.zeros(8, dtype=torch.uint8), dist.HashStore()
    usual = store.timeout
    group = SimpleNamespace(
        rank=lambda: 0, size=lambda: 2, group_name="0", get_group_store=lambda: store
    )
    addresses = [0 if offset is None else buffer.data_ptr() + offset for offset in offsets]
    handle = SimpleNamespace(buffer_ptrs=addresses)
    with (
        mock.patch.object(_symmetric_memory, "rendezvous", return_value=handle),
        pytest.raises(RuntimeError, match=reason) if reason else nullcontext(),
    ):
        memory = symmetric_memory._rendezvous(buffer, group, time.monotonic() + 9.0)
        assert memory.world_size == 2 and symmetric_memory._kept[-1] == (handle, memory)
    assert store.timeout == usual


@on_ranks(2)
def test_rendezvous_that_fails_on_one_rank(rank: int, world_size: int) -> None:
    """One rank fails in it, another waits for it in the group's store: they exchange otherwise."""
    comm, deadline = Communicator(), time.monotonic() + 20.0

    def rendezvous(buffer: Tensor, group_name: str) -> None:
        if rank == 1:
            raise OSError("no such memory")
        comm.link.group.get_group_store().get("what rank 1 never says")

    def gather(step: str, note: Note) -> Sequence[Note]:
        return comm._session._agreement.reach((("step", step),), deadline, note)

    with (
        mock.patch.object(symmetric_memory, "_CONNECT_SECONDS", 0.3),
        mock.patch.object(symmetric_memory, "_allocate", lambda *arguments: torch.zeros(8)),
        mock.patch.object(_symmetric_memory, "rendezvous", rendezvous),
        mock.patch.object(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=rank)
        ),
        mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
    ):
        found = symmetric_memory.connect(
            comm.link.group, CPU, Topology((0, 0)), "", gather, deadline
        )
    assert isinstance(found, str) and time.monotonic() < deadline - 15.0
    assert found.startswith("rank 0: rendezvous: "), found
    o, lse = states(world_size, (1, 4, 1, 16), FP32)
    assert_same_bits(comm.all_merge_states(o[rank], lse[rank]), merge_states(o, lse))


@on_ranks(2, fresh=True)
def test_failure_on_the_device_is_the_communicators(rank: int, world_size: int) -> None:
    comm = Communicator()
    memory = comm._resources._resources["one_shot", "cuda"] = symmetric_memory.SymmetricMemory(
        rank, [0, 0], CPU
    )
    comm.check()
    memory._words[symmetric_memory._ERRORS + 1 - rank] = 1
    reason = f"rank {rank} of 2: one_shot: rank {1 - rank} did not come in time; outputs of that"
    with pytest.raises(ExchangeError, match=reason):
        comm.check()
    assert comm.failed is not None and memory._words[symmetric_memory._ABORTED] == 1
    with pytest.raises(ExchangeError, match="has failed before: one_shot: rank"):
        comm.all_merge_states(torch.ones(1, 1, 1, 8), torch.zeros(1, 1, 1))


@on_ranks(2, fresh=True)
def test_aborts_reach_the_device(rank: int, world_size: int) -> None:
    comm = Communicator()
    memory = comm._resources._resources["one_shot", "cuda"] = symmetric_memory.SymmetricMemory(
        rank, [0, 0], CPU
    )
    comm.abort()
    assert memory._words[symmetric_memory._ABORTED] == 1
