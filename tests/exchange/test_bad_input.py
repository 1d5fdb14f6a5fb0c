# SPDX-License-Identifier: BSD-3-Clause
"""What ranks are asked for, set to or told that cannot be: a sentence, and nobody left waiting."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks
from faults import AMPLE, QUICK, call, failure
from tiers import tiers_of
from tree_attention import (
    BlockCyclic,
    Communicator,
    ExchangeError,
    all_merge_states,
    lean_decode,
    merge_states,
    ring_decode,
    ring_pass_q_decode,
    strategies,
    tree_decode,
)
from tree_attention.exchange import Note, on_every_rank
from tree_attention.exchange.agreement import signatures
from tree_attention.exchange.agreement.self_test import merge_digest
from tree_attention.exchange.notes import sentence

TIMEOUTS: list[tuple[object, type[Exception], str]] = [
    (math.inf, ValueError, "timeout must be above 0 and at most 10,000,000 seconds, got inf"),
    (math.nan, ValueError, "timeout must be above 0 and at most 10,000,000 seconds, got nan"),
    (0, ValueError, "timeout must be above 0 and at most 10,000,000 seconds, got 0"),
    (-1.5, ValueError, "timeout must be above 0 and at most 10,000,000 seconds, got -1.5"),
    (timedelta(0), ValueError, "timeout must be above 0 and at most 10,000,000 seconds, got 0:00"),
    ("5", TypeError, "timeout must be a number of seconds or a datetime.timedelta, got '5'"),
    (True, TypeError, "timeout must be a number of seconds or a datetime.timedelta, got True"),
]


def states() -> tuple[Tensor, Tensor]:
    return torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1)


def takes_timeout(comm: Communicator) -> dict[str, Callable[[Any], object]]:
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 4, 8)
    return {
        "Communicator": lambda timeout: Communicator(timeout=timeout),
        "tree_decode": lambda timeout: tree_decode(q, k, k, group=comm, timeout=timeout),
        "ring_decode": lambda timeout: ring_decode(q, k, k, group=comm, timeout=timeout),
        "ring_pass_q_decode": lambda timeout: ring_pass_q_decode(
            q, k, k, group=comm, timeout=timeout
        ),
        "all_merge_states": lambda timeout: all_merge_states(*states(), comm, timeout=timeout),
        "all_reduce": lambda timeout: comm.all_reduce(q, timeout=timeout),
        "all_gather": lambda timeout: comm.all_gather(q, [8] * comm.world_size, timeout=timeout),
        "agree": lambda timeout: comm.agree((), timeout),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_timeouts_that_are_none(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    for op, function in takes_timeout(comm).items():
        for timeout, kind, message in TIMEOUTS:
            if op == "agree" and world_size == 1:
                continue  # there is nothing to wait for
            with pytest.raises(kind, match=f"^{op}: {re.escape(message)}"):
                function(timeout)
        function(timedelta(seconds=AMPLE))
    assert comm.failed is None
    assert Communicator(timeout=timedelta(minutes=1)).timeout == 60.0


def differ(rank: int, world_size: int, what: str) -> str:
    comm = Communicator(timeout=AMPLE)
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 4, 8)
    slopes = torch.tensor([0.5, 0.25 + 0.125 * (rank if what == "slopes" else 0)])
    options = {"alibi_slopes": slopes, "query_positions": torch.tensor([[7]])}
    version = "1.0+cpu" if what == "torch" and rank else torch.__version__
    with mock.patch.object(signatures.torch, "__version__", version):
        seconds, message = failure(
            lambda: tree_decode(q, k, k, group=comm, **options)  # type: ignore[arg-type]
        )
    assert seconds < QUICK and comm.failed is None
    tree_decode(
        q, k, k, group=comm, alibi_slopes=torch.ones(2), query_positions=torch.ones(1, 1).long()
    )
    return message


def test_slopes_that_differ() -> None:
    for message in run_ranks(differ, 2, "slopes"):
        assert re.search("digest of alibi_slopes is [0-9a-f]{12} on rank 1, [0-9a-f]{12}", message)


def test_versions_of_torch_that_differ() -> None:
    for message in run_ranks(differ, 2, "torch"):
        assert "torch version is 1.0 on rank 1, " in message


def test_builds_of_one_release_may_work_together() -> None:
    for version in ("2.15.0+cpu", "2.15.0+cu132", "2.15.0"):
        with mock.patch.object(signatures.torch, "__version__", version):
            talk = signatures.Agreement(dist.HashStore(), 0, 1, "one rank")
            talk.reach((), time.monotonic() + AMPLE)
            assert talk._own["torch version"] == "2.15.0"


@pytest.mark.parametrize(
    "said,sentence_of_it",
    [
        (
            "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer "
            "[127.0.0.1]:37082. This is typically caused by a remote worker crashing. Good luck!",
            "Connection closed by peer [127.0.0.1]:37082.",
        ),
        ("Broken pipe\nException raised from sendBytes\nframe #0: f() + 0x1", "Broken pipe"),
        (
            "message to rank 1: [/x/unbound_buffer.cc:129] Timed out waiting 1ms",
            "message to rank 1: Timed out waiting 1ms",
        ),
        ("", "RuntimeError"),
        (
            "Class validation error:\n    ValueError: 128 is no multiple of 7.\nframe #0",
            "Class validation error: ValueError: 128 is no multiple of 7.",
        ),
    ],
)
def test_sentence_of_a_library(said: str, sentence_of_it: str) -> None:
    assert sentence(RuntimeError(said)) == sentence_of_it


def differ_in_kind(rank: int, world_size: int) -> str:
    comm = Communicator(timeout=AMPLE)
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 4, 8)
    if rank:
        _, message = failure(lambda: tree_decode(q, k, k, group=comm))
    else:
        _, message = failure(lambda: comm.all_merge_states(*states()))
    return message


def test_functions_that_differ_are_named() -> None:
    for message in run_ranks(differ_in_kind, 2):
        assert "call is tree_decode on rank 1, all_merge_states on rank 0" in message


GARBAGE = [
    b"\xff\xfe",
    b"no json",
    b"[1, 2]",
    b"7",
    b'{"a": 1}',
    b'{"abandoned calls": "x"}',
    b"{}",
]


class Scribbled:
    """A store in which somebody has written over what a rank publishes."""

    def __init__(self, store: dist.Store, content: bytes) -> None:
        self._store, self._content = store, content

    def get(self, key: str) -> bytes:
        return self._content if key.endswith("/1") else self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def read_garbage(rank: int, world_size: int, content: bytes) -> str:
    comm = Communicator(timeout=2.0 if content == b"{}" else AMPLE)
    assert comm._session is not None
    talk = comm._session._agreement
    talk._store = Scribbled(talk._store, content)  # type: ignore[assignment]
    with pytest.raises(ExchangeError) as caught:
        call("all_gather", comm)
    return str(caught.value)


@pytest.mark.parametrize("content", tiers_of(GARBAGE, quick=(b"no json", b"{}")))
def test_garbage_in_the_store(content: bytes) -> None:
    for message in run_ranks(read_garbage, 2, content, fresh=True):
        assert "rank 1" in message and "Traceback" not in message
        if content != b"{}":
            assert "the store of the process group holds" in message


@on_ranks(2)
def test_a_note_that_cannot_be_made(rank: int, world_size: int) -> None:
    """No rank waits for it."""

    def note(result: None) -> Note:
        if rank == 1:
            raise OSError("no such device")
        return {}

    with pytest.raises(OSError if rank == 1 else ExchangeError, match="no such device"):
        on_every_rank("test", Communicator(), 30.0, lambda: ((), None), note)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_default_device_is_not_the_tensors_device(rank: int, world_size: int) -> None:
    merge_digest.cache_clear()
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 10, 32)
    expected = [lean_decode(q, k, k), merge_states(*[x[None] for x in lean_decode(q, k, k)])]
    torch.set_default_device("meta")
    try:
        got = [lean_decode(q, k, k), merge_states(*[x[None] for x in lean_decode(q, k, k)])]
        for a, b in zip(expected, got, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        comm = Communicator(timeout=AMPLE)
        slots = BlockCyclic(world_size, 2).local_slots(rank, 0, 10)
        assert slots.device.type == "cpu"
        own = k[:, :, slots]
        whole = lean_decode(q, k, k)
        for strategy in strategies():
            o, lse = tree_decode(q, own, own, group=comm, strategy=strategy)
            assert torch.allclose(o, whole[0], atol=1e-5)
            assert torch.allclose(lse, whole[1], atol=1e-5)
        layout = BlockCyclic(world_size, 2).key_layout(rank)
        o, _ = tree_decode(q, own, own, group=comm, deterministic=2, key_layout=layout)
        assert torch.allclose(o, whole[0], atol=1e-5)
        for ring in (ring_decode, ring_pass_q_decode):
            assert torch.allclose(ring(q, own, own, group=comm)[0], whole[0], atol=1e-5)
        sums = Communicator(timeout=AMPLE)
        for size in (3, 100_000):
            assert torch.equal(sums.all_reduce(q.new_ones(size)), q.new_full((size,), world_size))
    finally:
        torch.set_default_device(None)


NO_TENSORS: list[tuple[Callable[..., object], tuple[object, ...], str]] = [
    (lean_decode, (None, None, None), "lean_decode: q must be a tensor, got None"),
    (merge_states, ([1.0], [2.0]), "merge_states: o_parts must be a tensor, got [1.0]"),
    (tree_decode, (torch.ones(1), "k", 3), "tree_decode: k_local must be a tensor, got 'k'"),
    (ring_decode, (None, None, None), "ring_decode: q must be a tensor, got None"),
    (ring_pass_q_decode, (1, 2, 3), "ring_pass_q_decode: q must be a tensor, got 1"),
    (all_merge_states, ([1], [2]), "all_merge_states: o must be a tensor, got [1]"),
]


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_tensors_without_values(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    o, lse = states()
    message = "must be on a device that holds values, got meta"
    with pytest.raises(ValueError, match=f"^all_reduce: x {message}"):
        comm.all_reduce(o.to("meta"))
    with pytest.raises(TypeError, match=r"^all_reduce: x must be a dense tensor, got .*sparse_coo"):
        comm.all_reduce(o.to_sparse())
    with pytest.raises(ValueError, match=f"^all_merge_states: o and lse {message}"):
        comm.all_merge_states(o.to("meta"), lse.to("meta"))
    if world_size > 1:
        with pytest.raises(ValueError, match=f"^tree_decode: o and lse {message}"):
            call("all_gather", comm, device="meta")
    assert comm.failed is None
    call("all_gather", comm)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_rings_refuse_as_lean_decode_does(rank: int, world_size: int) -> None:
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 4, 8)
    for ring in (ring_decode, ring_pass_q_decode):
        with pytest.raises(ValueError, match="lean_decode: k must have shape"):
            ring(q, torch.tensor(1.0), k)
        with pytest.raises(TypeError, match=r"_decode: key_layout must be three integers .*got 1"):
            ring(q, k, k, key_layout=1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"lean_decode: alibi_slopes must be a tensor, got 0.5"):
            ring(q, k, k, alibi_slopes=0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"lean_decode: key_ranges must be a tensor"):
            ring(q, k, k, [[0, 4]])  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_arguments_that_are_no_tensors(rank: int, world_size: int) -> None:
    for function, arguments, message in NO_TENSORS:
        with pytest.raises(TypeError) as caught:
            function(*arguments)
        assert str(caught.value) == message
    with pytest.raises(TypeError, match=r"^all_reduce: x must be a tensor, got 1.5"):
        Communicator().all_reduce(1.5)  # type: ignore[arg-type]
