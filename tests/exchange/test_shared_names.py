# SPDX-License-Identifier: BSD-3-Clause
"""What an engine and this library share with a process group: tags, keys of its store, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import on_ranks, run_ranks
from faults import AMPLE, KINDS, call
from pairwise import each_pair
from tiers import tiers
from tree_attention import tree_decode
from tree_attention.exchange import Communicator, Link
from tree_attention.exchange.transport.buffers import StateLayout

MESSAGE = StateLayout((2, 4, 1), 32, torch.float32).message_bytes  # of `faults.call`
SIZES = (16, MESSAGE, 4 * 4096)  # in bytes; the last is that of a message of the test of delivery


def deterministic(comm: Communicator) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(comm.rank)
    q, (k, v) = torch.ones(2, 4, 1, 32), torch.randn(2, 2, 2, 8, 32)
    layout = (8 * comm.rank, 8, 8 * comm.world_size)
    return tree_decode(q, k, v, group=comm, key_layout=layout, deterministic=8, timeout=AMPLE)


def agree(comm: Communicator) -> tuple[torch.Tensor, ...]:
    comm.agree((("field", 1),), AMPLE)
    return ()


CALLS: dict[str, Callable[[Communicator], tuple[torch.Tensor, ...]]] = {
    **{kind: lambda comm, kind=kind: call(kind, comm, timeout=AMPLE) for kind in KINDS},  # type: ignore[misc]
    "deterministic": deterministic,
    "head_sharded": lambda comm: call("two_phase", comm, head_sharded=True, timeout=AMPLE),
    "small sum": lambda comm: (comm.all_reduce(torch.ones(MESSAGE // 4 - 2), timeout=AMPLE),),
    "large sum": lambda comm: (comm.all_reduce(torch.ones(70_000), timeout=AMPLE),),
    "all_gather": lambda comm: (
        comm.all_gather(torch.ones(2), (2,) * comm.world_size, timeout=AMPLE),
    ),
    "agree": agree,
}


def tags_of(rng: Random) -> list[int]:
    """Those that programs count up to, those around multiples of 256, and any below 2^16."""
    near = [256 * rng.randrange(1, 4) + rng.randrange(-2, 4) for _ in range(3)]
    tags = {0, 256, 257, 0x7A77, 1 << 16, *near, *(rng.randrange(1 << 16) for _ in range(3))}
    return rng.sample(sorted(tags), len(tags))


def message(sender: int, receiver: int, tag: int, num_bytes: int) -> torch.Tensor:
    number = tag + (1 << 20) * sender + (1 << 24) * receiver
    return torch.full((num_bytes // 4,), number, dtype=torch.int32)


def send_around(rank: int, world_size: int, nodes: str, seed: int) -> None:
    """Messages of an engine are under way around every kind of call, to and from all ranks."""
    rng, group = Random(seed), dist.new_group()
    names = rng.sample(sorted(CALLS), len(CALLS))
    with_none = [CALLS[name](Communicator(dist.new_group(), nodes=nodes)) for name in names]
    comm = Communicator(group, nodes=nodes)
    others = [r for r in range(world_size) if r != rank]
    for name, expected in zip(names, with_none, strict=True):
        works: list[dist.Work] = []
        sent, received = [], []
        for tag in tags_of(rng):
            num_bytes, sends_before = rng.choice(SIZES), rng.random() < 0.5
            for other in others:
                mine = message(rank, other, tag, num_bytes)
                theirs = torch.zeros(num_bytes // 4, dtype=torch.int32)
                received.append((theirs, message(other, rank, tag, num_bytes)))
                # Whichever side comes first waits for the other through our call.
                if sends_before:
                    works.append(dist.isend(mine, other, group, tag))
                    sent.append(lambda x=theirs, r=other, t=tag: dist.irecv(x, r, group, t))  # type: ignore[misc]
                else:
                    works.append(dist.irecv(theirs, other, group, tag))  # type: ignore[arg-type]
                    sent.append(lambda x=mine, r=other, t=tag: dist.isend(x, r, group, t))  # type: ignore[misc]
        found = CALLS[name](comm)
        works += [start() for start in sent]
        for work in works:
            work.wait()
        for theirs, right in received:
            assert torch.equal(theirs, right), (name, rank, right[0])
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y), name
    assert comm.failed is None


QUICK = [*product(("aa", "abc"), (True, False), (0,))]
WAYS = product(("aa", "abc", "ab", "aaa", "aab"), (True, False), (0, 1, 2))


@pytest.mark.parametrize(
    "nodes, direct, seed", tiers(QUICK[:2], [*QUICK[2:], *each_pair(WAYS, QUICK)])
)
def test_messages_of_an_engine_are_not_mixed_with_ours(nodes: str, direct: bool, seed: int) -> None:
    run_ranks(send_around, len(nodes), nodes, seed, direct=direct)


@on_ranks(2)
def test_tags_of_many_communicators_differ_and_fit(rank: int, world_size: int) -> None:
    link = Link(dist.group.WORLD)  # type: ignore[arg-type]
    nobodys, first = link.first_tag, []
    for number in (1, 2, 3, 4_194_303, 4_194_304, 2**40):
        link.use_tags_of(number)
        first.append(link.first_tag)
    assert min(first) > nobodys + 255 >= 1 << 30 and max(first) + 255 <= (1 << 31) - 1
    assert len(set(first[:4])) == 4 and all(tag % 256 == 0 for tag in first)
    assert first[4] == first[0], "after four million the first tags come again"


def last_tags(rank: int, world_size: int) -> None:
    """A communicator that has the last tags of all, as after millions of others."""
    group = dist.new_group()
    with mock.patch.object(Link, "use_tags_of", lambda self, _: setattr(self, "first_tag", LAST)):
        comm = Communicator(group)
    for name in sorted(CALLS):
        CALLS[name](comm)


LAST = (1 << 31) - 256


def test_the_last_tags_work() -> None:
    run_ranks(last_tags, 3, direct=False)


@on_ranks(2, fresh=True)
def test_keys_and_threads_begin_with_our_name(rank: int, world_size: int) -> None:
    keys, names = set(), set()
    group = dist.new_group()
    store = group.get_group_store()
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        names.add(thread.name)
        started(thread)

    class Watched:
        """The store, whose every argument that is a key is noted."""

        def __getattr__(self, name: str) -> Any:
            method = getattr(store, name)

            def run(*args: Any) -> Any:
                if args:
                    keys.update([args[0]] if isinstance(args[0], str) else args[0])
                return method(*args)

            return run

    with (
        mock.patch.object(dist.ProcessGroup, "get_group_store", lambda _: Watched()),
        mock.patch.object(threading.Thread, "start", start),
    ):
        comm = Communicator(group)
        for run in CALLS.values():
            run(comm)
    assert keys and all(key.startswith("tree_attention/") for key in keys), keys
    assert names and all(name.startswith("tree_attention") for name in names), names
