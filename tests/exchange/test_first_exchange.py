# SPDX-License-Identifier: BSD-3-Clause
"""What ranks compare and try out before they exchange, and what they refuse then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks, start_process
from fake_device import fake_cuda
from helpers import assert_same_bits
from test_merge_over_ranks import INF, State, random_states
from tiers import tiers
from tree_attention import (
    ExchangeError,
    merge_states,
)
from tree_attention.exchange import Communicator, Link, communicator
from tree_attention.exchange.agreement import self_test, session
from tree_attention.exchange.agreement.self_test import merge_digest
from tree_attention.exchange.auto import choose
from tree_attention.exchange.strategies import STRATEGIES, Strategy, two_phase
from tree_attention.exchange.transport.messages import PointToPoint


@on_ranks(3)
def test_agreement_and_broadcast(rank: int, world_size: int) -> None:
    comm = Communicator()
    comm.agree((("prompt", "abc"),))
    with pytest.raises(ExchangeError, match=r"rank . of 3: prompt is x2 on rank 2, x0 on rank 0"):
        comm.agree((("prompt", "x2" if rank == 2 else "x0"),))
    assert comm.failed is None and comm.bytes_sent == 0
    message = torch.full((4,), rank)
    with comm.begin("broadcast") as broadcast:
        broadcast.run((), lambda deadline: comm.link.broadcast(message, deadline))
    assert message.tolist() == [0] * 4
    assert comm.bytes_sent == (2 * 4 * 8 if rank == 0 else 0)


@on_ranks(3)
def test_processors_that_round_differently_are_refused(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=20.0)
    o, lse = torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1)
    with mock.patch.object(communicator, "merge_digest", lambda device: f"bits of {rank // 2}"):
        message = "test merge, as this processor rounds it, is bits of 1 on rank 2, bits of 0 on r"
        with pytest.raises(ExchangeError, match=message):
            comm.all_merge_states(o, lse)
    assert comm.bytes_sent == 0
    comm.all_merge_states(o, lse)


def misdeliver(rank: int, world_size: int, operation: str) -> str:
    """Rank 1 finds the messages of its peers in another order."""
    owner = PointToPoint if operation == "finish" else Link
    original = getattr(owner, operation)

    def permuted(self: Link | PointToPoint, *args: Any) -> None:
        original(self, *args)
        if isinstance(self, PointToPoint):
            first, second = self._receive.values()
        else:
            first, second = args[0].unbind()[1:]
        held = first.clone()
        first.copy_(second)
        second.copy_(held)

    comm = Communicator(timeout=20.0)
    o, lse = torch.ones(1, 3, 1, 8), torch.zeros(1, 3, 1)
    with (
        mock.patch.object(owner, operation, permuted if rank == 1 else original),
        pytest.raises(ExchangeError) as caught,
    ):
        comm.all_merge_states(o, lse)
    with pytest.raises(ExchangeError, match="has failed before: delivery test"):
        comm.all_merge_states(o, lse)
    return str(caught.value)


@pytest.mark.parametrize(
    "operation, found",
    tiers(
        [("all_gather", "all_gather brought rank 1 messages 0, 2, 1 instead of 0, 1, 2")],
        [
            ("all_to_all", "0 to 1, 2 to 1, 1 to 1 instead of 0 to 1, 1 to 1, 2 to 1"),
            (
                "finish",
                "messages brought rank 1 messages 2 to 1, 1 to 1, 0 to 1 instead of 0 to 1, 1 to",
            ),
        ],
    ),
)
def test_messages_in_another_order_are_refused(operation: str, found: str) -> None:
    for message in run_ranks(misdeliver, 3, operation, fresh=True, direct=False):
        assert found in message and "passed on rank" in message


@on_ranks(2)
def test_one_delivery_test_for_each_kind_of_device(rank: int, world_size: int) -> None:
    comm = Communicator()
    with mock.patch.object(session, "delivery_fault", return_value="") as test:
        for strategy, rows in (("all_gather", 2), ("all_gather", 3), ("two_phase", 3)):
            comm.all_merge_states(
                torch.ones(1, rows, 1, 8), torch.zeros(1, rows, 1), strategy=strategy
            )
        assert test.call_count == 1 and test.call_args.args[1].type == "cpu"
        with fake_cuda():
            comm.all_merge_states(torch.ones(1, 2, 1, 8).cuda(), torch.zeros(1, 2, 1).cuda())
        assert test.call_count == 2 and test.call_args.args[1].type == "cuda"
    assert comm.bytes_sent == comm.link.bytes_sent


@on_ranks(3)
def test_strategy_that_cannot_be_set_up(rank: int, world_size: int) -> None:
    """Where setting it up fails, every rank knows why, and "auto" does without."""
    comm = Communicator()
    states = random_states(3, world_size)
    state = tuple(x[rank] for x in states)

    def set_up(link: Link, device: torch.device, *_: Any) -> str:
        return f"there is no {device}"

    chosen = Strategy(two_phase.prepare, two_phase.traffic, set_up=set_up)
    rules = (choose.Rule("gloo", 2, choose._ANYWHERE, math.inf, "two_phase"), *choose.RULES)
    with (
        mock.patch.dict(STRATEGIES, {"two_phase": chosen}),
        mock.patch.object(choose, "RULES", rules),
    ):
        with pytest.raises(ExchangeError, match="two_phase is not available: there is no cpu"):
            comm.all_merge_states(*state, strategy="two_phase")
        assert_same_bits(comm.all_merge_states(*state), merge_states(*states))
        assert comm.unavailable(state[0].device)["two_phase"] == "there is no cpu"
    assert comm.failed is None


@on_ranks(2)
def test_agreements_between_exchanges(rank: int, world_size: int) -> None:
    """What ranks found out about strategies at the first exchange holds for all later ones."""
    comm = Communicator()
    states = random_states(3, world_size)
    state = tuple(x[rank] for x in states)
    device = torch.device("cpu")
    assert not comm.unavailable(device)
    comm.all_merge_states(*state)
    known = dict(comm.unavailable(device))
    assert known == {"one_shot": "tensors are on the cpu, not in the memory of a GPU"}
    comm.agree((("anything", 1),))
    assert comm.unavailable(device) == known
    assert_same_bits(comm.all_merge_states(*state, explain=True), merge_states(*states))


def test_digest_of_the_test_merge() -> None:
    def rounds_up(o_parts: Tensor, lse_parts: Tensor) -> State:
        o, lse = merge_states(o_parts, lse_parts)
        return o, lse.nextafter(torch.tensor(INF))

    cpu, digest = torch.device("cpu"), merge_digest.__wrapped__
    expected = digest(cpu)
    assert digest(cpu) == merge_digest(cpu) == expected
    with mock.patch.object(self_test, "merge_states", rounds_up):
        assert digest(cpu) != expected


def join_and_exchange(rank: int, stores: list[str]) -> None:
    """In one group after the other, by a file that is the store of each."""
    torch.set_num_threads(1)
    for path in stores:
        dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
        for _ in range(2):  # two communicators of the group
            comm = Communicator(timeout=20.0)
            total = comm.all_reduce(torch.tensor([1.0 + rank]))
            assert total.tolist() == [3.0]
        dist.destroy_process_group()


def test_replaced_rank_meets_the_others(tmp_path: Path) -> None:
    """Rank 0 goes on with a new process in place of rank 1, which has made no communicator yet."""
    stores = [str(tmp_path / name) for name in ("first", "second")]
    survivor = start_process(0, join_and_exchange, 0, stores)
    for store in stores:
        other = start_process(1, join_and_exchange, 1, [store])
        other.join(60.0)
        assert other.exitcode == 0
    survivor.join(60.0)
    assert survivor.exitcode == 0
