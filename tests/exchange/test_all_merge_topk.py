# SPDX-License-Identifier: BSD-3-Clause
"""Choices of keys over ranks: the same bits everywhere, or an error in time."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import COMPILING, Lost, on_ranks, run_ranks
from faults import AMPLE, SLACK, TIMEOUT, end_or_stall, failure
from helpers import assert_same_bits
from tiers import by_world, tiers
from tree_attention import (
    BlockCyclic,
    Communicator,
    Contiguous,
    ExchangeError,
    ShardLayout,
    all_merge_topk,
    index_topk,
    merge_topk,
    reference,
)

SEQLEN_K = 150


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Few integers, so that many scores tie."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (2, 4, 3, 16), generator=generator).float()
    k = torch.randint(-2, 3, (2, 1, SEQLEN_K, 16), generator=generator).float()
    k = k[:, :, torch.arange(SEQLEN_K) % 13]
    return q, k, torch.randint(-2, 3, (2, 4, 3), generator=generator).float()


def layouts(world_size: int) -> list[ShardLayout]:
    """Some with shards that are empty."""
    last = Contiguous((0,) * world_size + (SEQLEN_K,))
    uneven = Contiguous((0, *sorted([1] * (world_size - 1)), SEQLEN_K))
    return [BlockCyclic(world_size, block=8), BlockCyclic(world_size, block=100), last, uneven]


@by_world([1, 2], [3, 4, 5, 8])
@on_ranks()
def test_the_choice_among_all_keys(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    q, k, weights = problem()
    for layout in layouts(world_size):
        slots = layout.local_slots(rank, 0, SEQLEN_K)
        for topk, block, w in ((20, 1, weights), (20, 1, None), (200, 1, weights), (6, 12, None)):
            options: dict[str, Any] = {"topk": topk, "block": block}
            expected = index_topk(q, k, w, **options)
            assert (expected[0].diff() == 0).any(), "nothing ties"
            own = index_topk(q, k[:, :, slots], w, key_slots=slots.int(), **options)
            found = comm.all_merge_topk(*own, topk=topk)
            assert_same_bits(found, expected)
            strided = (torch.stack((x, x), -1)[..., 0] for x in own)
            assert_same_bits(all_merge_topk(*strided, comm, topk=3), [x[..., :3] for x in expected])


@on_ranks(3)
def test_bytes_rounds_and_rows_without_entries(rank: int, world_size: int) -> None:
    """8 bytes an entry to every other rank in one round, and nothing more in an equal call."""
    comm = Communicator(timeout=AMPLE)
    scores = torch.full((2, 1, 1, 100), -torch.inf)
    slots = torch.full_like(scores, -1, dtype=torch.int32)
    scores[0, ..., rank], slots[0, ..., rank] = torch.nan, rank
    for _ in range(2):
        before = comm.bytes_sent, comm.link.num_operations
        merged = comm.all_merge_topk(scores, slots, topk=4)
    assert comm.bytes_sent - before[0] == 8 * scores.numel() * (world_size - 1)
    assert comm.link.num_operations - before[1] == 1
    assert merged[1].flatten().tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert merged[0][0].isnan().sum() == 3 and (merged[0][1] == -torch.inf).all()
    empty = torch.empty(0, 4), torch.empty(0, 4, dtype=torch.int32)
    assert comm.all_merge_topk(*empty, topk=2)[0].shape == (0, 2)
    none = torch.empty(3, 0), torch.empty(3, 0, dtype=torch.int32)
    assert (comm.all_merge_topk(*none, topk=2)[1] == -1).all()


def test_one_process_needs_no_group() -> None:
    scores, slots = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([5, 4, 3]).int()
    found = all_merge_topk(scores, slots, topk=4)
    assert found[1].tolist() == [4, 3, 5, -1]
    assert_same_bits(found, merge_topk(scores[None], slots[None], topk=4))


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scores": 1}, TypeError, "scores must be a tensor, got 1"),
    ({"scores": torch.ones(2, 3).double()}, ValueError,
     "scores must be float32 [..., k] and slots int32 of the same shape, got torch.float64"),
    ({"slots": torch.ones(2, 3).long()}, ValueError, "scores must be float32 [..., k] and slots"),
    ({"slots": torch.ones(3).int()}, ValueError, "scores must be float32 [..., k] and slots"),
    ({"scores": torch.tensor(1.0), "slots": torch.tensor(1).int()}, ValueError,
     "scores must be float32 [..., k] and slots"),
    ({"slots": torch.ones(2, 3).int().to("meta")}, ValueError,
     "scores and slots must be on one device, got cpu and meta"),
    ({"topk": 0}, ValueError, "topk must be an integer from 1 to 2147483647, got 0"),
    ({"topk": True}, TypeError, "topk must be an integer from 1 to 2147483647, got True"),
    ({"index_dtype": "bfloat16"}, TypeError,
     "index_dtype must be a torch.dtype or None, got 'bfloat16'"),
    ({"timeout": 0}, ValueError, "timeout must be above 0"),
    ({"scores": torch.ones(2, 3).requires_grad_()}, RuntimeError,
     "scores and slots must not require a gradient"),
]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_refused_arguments(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    right = {"scores": torch.ones(2, 3), "slots": torch.arange(6).view(2, 3).int(), "topk": 2}
    for changed, error, message in REFUSED:
        arguments = right | changed
        with pytest.raises(error, match=f"^all_merge_topk: {re.escape(message)}"):
            all_merge_topk(arguments.pop("scores"), arguments.pop("slots"), comm, **arguments)
    assert comm.bytes_sent == 0 and comm.failed is None
    assert all_merge_topk(**right, group=comm)[1].tolist() == [[0, 1], [3, 4]]


@on_ranks(3)
def test_disagreement_names_rank_and_field(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    last = rank == 2  # of world 3
    scores, slots = torch.ones(2, 5), torch.arange(10).view(2, 5).int()
    with pytest.raises(ExchangeError, match="topk is 4 on rank 2, 3 on rank 0"):
        comm.all_merge_topk(scores, slots, topk=3 + last)
    with pytest.raises(ExchangeError, match=r"shape of scores is \(1, 5\) on rank 2, \(2, 5\) on"):
        comm.all_merge_topk(scores[last:], slots[last:], topk=3)
    with pytest.raises(ExchangeError, match="call is all_reduce on rank 2, all_merge_topk on rank"):
        comm.all_reduce(scores) if last else comm.all_merge_topk(scores, slots, topk=3)
    dtype = torch.bfloat16 if last else torch.float32
    message = r"index_dtype is torch\.bfloat16 on rank 2, torch\.float32 on rank 0"
    with pytest.raises(ExchangeError, match=message):
        comm.all_merge_topk(scores, slots, topk=3, index_dtype=dtype)
    expected = merge_topk(scores.expand(3, 2, 5), slots.expand(3, 2, 5), topk=3)
    assert_same_bits(comm.all_merge_topk(scores, slots, topk=3), expected)


@on_ranks(3)
def test_a_change_after_equal_calls_is_found(rank: int, world_size: int) -> None:
    """Equal calls repeat their messages without comparing; other shapes may have as many bytes."""
    comm = Communicator(timeout=AMPLE)
    every = torch.rand(world_size, 2, 5, generator=torch.Generator().manual_seed(0))
    named = torch.arange(every.numel()).view_as(every).int()
    expected = merge_topk(every, named, topk=3)
    scores, slots = every[rank], named[rank]
    changes: list[tuple[tuple[int, ...], int, str]] = [
        ((2, 5), 4, "topk is 4 on rank 2, 3 on rank 0"),
        ((5, 2), 3, r"shape of scores is \(5, 2\) on rank 2, \(2, 5\) on rank 0"),
        ((10,), 3, r"shape of scores is \(10,\) on rank 2, \(2, 5\) on rank 0"),
    ]
    for shape, topk, message in changes:
        for _ in range(4):
            assert_same_bits(comm.all_merge_topk(scores, slots, topk=3), expected)
        if rank < 2:
            shape, topk = (2, 5), 3
        with pytest.raises(ExchangeError, match=message):
            comm.all_merge_topk(scores.view(shape), slots.view(shape), topk=topk)
    if rank == 2:
        time.sleep(0.5)  # late, and in time
    assert_same_bits(comm.all_merge_topk(scores, slots, topk=3), expected)


def one_is_wrong(rank: int, world_size: int) -> str:
    comm = Communicator(dist.new_group(range(world_size)), timeout=AMPLE)
    scores, slots = torch.ones(2, 5), torch.arange(10).view(2, 5).int()
    comm.all_merge_topk(scores, slots, topk=3)
    begin = time.monotonic()
    with pytest.raises((ExchangeError, ValueError)) as error:
        comm.all_merge_topk(scores.double() if rank else scores, slots, topk=3, timeout=TIMEOUT)
    assert time.monotonic() - begin < TIMEOUT + SLACK
    return str(error.value)


def test_ranks_with_right_arguments_raise_at_their_timeout() -> None:
    first, second = run_ranks(one_is_wrong, 2)
    assert second.startswith("all_merge_topk: scores must be float32")
    assert first.startswith("rank 0 of 2: no answer within")


def lose_a_rank(rank: int, world_size: int, how: str) -> float:
    comm = Communicator(timeout=AMPLE)
    scores, slots = torch.ones(4), torch.arange(4).int() + 4 * rank
    comm.all_merge_topk(scores, slots, topk=4)
    if rank == 1:
        end_or_stall(how)
    return failure(comm.all_merge_topk, scores, slots, topk=4, timeout=TIMEOUT)[0]


@pytest.mark.parametrize("how", tiers(["kill"], ["stop"]))
def test_lost_ranks_end_the_call_in_time(how: str) -> None:
    results = run_ranks(lose_a_rank, 3, how, lost=[1])
    assert isinstance(results[1], Lost)
    assert max(results[0], results[2]) < TIMEOUT + SLACK


@on_ranks(2, timeout=COMPILING)
def test_compiles_into_one_graph(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=COMPILING)

    def step(scores: Tensor, slots: Tensor) -> Tensor:
        scores, slots = all_merge_topk(scores, slots, comm, topk=3, index_dtype=torch.float32)
        return torch.where(slots < 0, 0, slots) + 1

    scores, slots = torch.arange(5.0) + rank, torch.arange(5).int() + 10 * rank
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = step(scores, slots)
        assert torch.equal(compiled(scores, slots), expected)
    merged = reference.merge_topk(
        torch.stack([torch.arange(5.0), torch.arange(5.0) + 1]),
        torch.stack([torch.arange(5), torch.arange(5) + 10]),
        topk=3,
    )
    assert torch.equal(merged[1] + 1, expected)
