# SPDX-License-Identifier: BSD-3-Clause
"""What both rings promise: exact results, the same bits on every rank, and refusals in time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks
from faults import AMPLE
from helpers import assert_same_bits, make_problem
from instruction_sets import QUICK, use
from sharded import CASES, LAYOUTS, WORLDS, make_case, merged
from tiers import tiers_of
from tree_attention import (
    BlockCyclic,
    ExchangeError,
    baselines,
    lean_decode,
    ring_decode,
    ring_pass_q_decode,
    tree_decode,
)
from tree_attention.exchange import Communicator, Link
from tree_attention.exchange.transport.messages import Messages

State = tuple[Tensor, Tensor]
RINGS = {"ring_decode": ring_decode, "ring_pass_q_decode": ring_pass_q_decode}
rings = pytest.mark.parametrize("name", RINGS)


def decode_case(rank: int, world_size: int, name: str, case: str, layout: str) -> State:
    problem, shards = make_case(case, layout, world_size)
    own = shards[rank]
    result = RINGS[name](own.q, own.k, own.v, own.key_ranges, **own.options)
    assert result[0].dtype == own.q.dtype
    problem.check(*result)
    if name == "ring_decode":  # it merges the shards in the order of tree_decode
        assert_same_bits(result, merged(shards, own.q.dtype))
    return result


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", tiers_of(LAYOUTS, quick=["uneven"]))
@pytest.mark.parametrize("case", CASES)
@rings
def test_exact_and_same_bits(name: str, case: str, layout: str, world_size: int) -> None:
    results = run_ranks(decode_case, world_size, name, case, layout)
    for result in results[1:]:
        assert_same_bits(result, results[0])


@rings
def test_without_process_group(name: str) -> None:
    problem = make_problem(seqlen_q=2, ranges="causal", dtype=torch.bfloat16)
    result = RINGS[name](problem.q, problem.k, problem.v, problem.key_ranges)
    assert_same_bits(result, lean_decode(problem.q, problem.k, problem.v, problem.key_ranges))


@on_ranks(2)
def test_ranks_of_other_instruction_sets_do_not_share_a_ring(rank: int, world_size: int) -> None:
    """Each of them attends to all shards, and would have bits of its own."""
    if QUICK[0] == QUICK[1]:
        return
    own = make_problem(seqlen_k=500).shard(BlockCyclic(2, 64), rank)
    with use(QUICK[rank]), pytest.raises(ExchangeError, match=r"instruction set is .* on rank 1"):
        ring_decode(own.q, own.k, own.v, group=Communicator())


@on_ranks(3)
def test_shards_of_other_sizes_in_the_debugging_mode_of_torch(rank: int, world_size: int) -> None:
    """It counts the messages of each rank, and refuses the next collective where they differ."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        comm = Communicator(dist.new_group(range(world_size)))
        own = make_problem(seqlen_k=100).shard(BlockCyclic(world_size, 64), rank)
        assert (own.k.shape[2] == 0) == (rank == 2)
        expected = tree_decode(own.q, own.k, own.v, group=comm)
        for _ in range(2):
            assert_same_bits(ring_decode(own.q, own.k, own.v, group=comm), expected)
    finally:
        dist.set_debug_level(before)


@rings
@on_ranks(3)
def test_calls_without_rows(rank: int, world_size: int, name: str) -> None:
    """No sequences or no queries, between calls that have some."""
    kv = torch.ones(2, 2, 5, 8)
    comm = Communicator()
    for batch, seqlen_q in ((2, 1), (0, 1), (2, 0), (0, 0), (2, 1)):
        q = torch.ones(batch, 4, seqlen_q, 8)
        o, lse = RINGS[name](q, kv[:batch], kv[:batch], group=comm)
        assert o.shape == q.shape and lse.shape == q.shape[:3] and (o == 1).all()


@rings
@on_ranks(2)
def test_arguments_are_refused_before_anything_is_sent(
    rank: int, world_size: int, name: str
) -> None:
    torch.manual_seed(5)
    problem = make_problem(seqlen_k=20)
    q, k, v = problem.q, problem.k, problem.v
    comm = Communicator(timeout=AMPLE)
    decode = RINGS[name]
    good = decode(q, k, v, group=comm)
    sent = comm.bytes_sent
    with pytest.raises(ValueError, match="lean_decode: q must have shape"):
        decode(q[0], k, v, group=comm)
    with pytest.raises(ValueError, match="lean_decode: key_layout must be"):
        decode(q, k, v, group=comm, key_layout=(0, 2, 1))
    with pytest.raises(ValueError, match="lean_decode: key_ranges must"):
        decode(q, k, v, torch.zeros(2, 1, 2), group=comm)
    pages = torch.full((2, 3), 7, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lean_decode: page_table must hold page ids in \[0, 2\)"):
        decode(q, k, v, group=comm, page_table=pages)
    with pytest.raises(ValueError, match=f"^{name}: q must be on a device that holds values"):
        decode(q.to("meta"), k.to("meta"), v.to("meta"), group=comm)
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected .* 'strategy'"):
        decode(q, k, v, group=comm, strategy="auto")
    assert comm.bytes_sent == sent
    assert_same_bits(decode(q, k, v, group=comm), good)


def count_transfers(rank: int, world_size: int, name: str) -> tuple[list[int], int, int]:
    """The transfers that are under way in each call of lean_decode, and after the last, and the
    number of deadlines that they have."""
    problem = make_problem(batch=3, seqlen_k=64)
    own = problem.shard(BlockCyclic(world_size, 8), rank)
    comm = Communicator()
    under_way = 0
    during: list[int] = []
    deadlines: set[float] = set()
    owner = Messages if name == "ring_pass_q_decode" else Link
    start_name = "start" if owner is Messages else "start_shift"
    start, finish = getattr(owner, start_name), owner.finish

    def counting_start(*args: Any) -> Any:
        nonlocal under_way
        under_way += 1
        return start(*args)

    def counting_finish(self: Any, *args: Any) -> None:
        nonlocal under_way
        finish(self, *args)
        deadlines.add(args[-1])
        under_way -= 1

    def counting_decode(*args: Any, **options: Any) -> State:
        during.append(under_way)
        return lean_decode(*args, **options)

    with (
        mock.patch.object(owner, start_name, counting_start),
        mock.patch.object(owner, "finish", counting_finish),
        mock.patch.object(baselines, "lean_decode", counting_decode),
    ):
        RINGS[name](own.q, own.k, own.v, group=comm)
    return during, under_way, len(deadlines)


@pytest.mark.parametrize(
    ("name", "during"),
    [
        # The last hop has nothing to receive.
        ("ring_decode", [1, 1, 0]),
        # Hops with queries, with queries and a state, and with a state to come.
        ("ring_pass_q_decode", [1, 1, 1]),
    ],
)
def test_transfers_overlap_attention_and_end_in_time(name: str, during: list[int]) -> None:
    assert run_ranks(count_transfers, 3, name) == [(during, 0, 1)] * 3
