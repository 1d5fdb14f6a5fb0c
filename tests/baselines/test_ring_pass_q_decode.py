# SPDX-License-Identifier: BSD-3-Clause
"""ring_pass_q_decode: exact, the same bits on every rank, at a cost without the context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from helpers import assert_same_bits, make_problem, paginate
from sharded import CASES, LAYOUTS, WORLDS, make_case
from tree_attention import BlockCyclic, lean_decode, ring_pass_q_decode
from tree_attention.exchange import Communicator

State = tuple[Tensor, Tensor]


def decode_case(rank: int, world_size: int, case: str, layout: str) -> State:
    problem, shards = make_case(case, layout, world_size)
    own = shards[rank]
    result = ring_pass_q_decode(own.q, own.k, own.v, own.key_ranges, **own.options)
    assert result[0].dtype == own.q.dtype
    problem.check(*result)
    return result


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_exact_and_same_bits(case: str, layout: str, world_size: int) -> None:
    results = run_ranks(decode_case, world_size, case, layout)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def decode_any_split(rank: int, world_size: int) -> None:
    """More sequences than heads or the other way round, fewer than ranks, pages, two ranks."""
    for batch, heads_kv, layout in ((1, 1, 0), (1, 5, 0), (7, 2, 0), (3, 4, 1), (4, 3, 2)):
        torch.manual_seed(batch)
        problem = make_problem(batch=batch, num_heads_kv=heads_kv, seqlen_q=2, seqlen_k=50)
        own = problem.shard(BlockCyclic(world_size, 4), rank)
        k, v, table = own.k, own.v, None
        if layout:
            k, v, table = paginate(own.k, own.v, 8, per_head=layout == 2)
        ranges = torch.tensor([0, own.k.shape[2]], dtype=torch.int32).repeat(batch, 2, 1)
        problem.check(*ring_pass_q_decode(own.q, k, v, ranges, page_table=table))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_any_split(world_size: int) -> None:
    run_ranks(decode_any_split, world_size)


def decode_nothing(rank: int, world_size: int) -> None:
    """No sequences or no queries, between calls that have some."""
    kv = torch.ones(2, 2, 5, 8)
    comm = Communicator()
    for batch, seqlen_q in ((2, 1), (0, 1), (2, 0), (0, 0), (2, 1)):
        q = torch.ones(batch, 4, seqlen_q, 8)
        o, lse = ring_pass_q_decode(q, kv[:batch], kv[:batch], group=comm)
        assert o.shape == q.shape and lse.shape == q.shape[:3] and (o == 1).all()


def test_calls_without_rows() -> None:
    run_ranks(decode_nothing, 3)


def queries_travel(rank: int, world_size: int) -> State:
    """Each rank reads its own part of q only; the others' parts come by the ring."""
    torch.manual_seed(1)
    problem = make_problem(batch=1, num_heads_kv=3, group_size=2, seqlen_k=40)
    own = problem.shard(BlockCyclic(world_size, 4), rank)
    q = torch.full_like(own.q, torch.nan)
    q[:, 2 * rank : 2 * rank + 2] = own.q[:, 2 * rank : 2 * rank + 2]
    result = ring_pass_q_decode(q, own.k, own.v)
    problem.check(*result)
    return result


def test_queries_travel() -> None:
    run_ranks(queries_travel, 3)


def count_bytes(rank: int, world_size: int, seqlen_k: int) -> int:
    torch.manual_seed(3)
    problem = make_problem(
        batch=4, num_heads_kv=2, group_size=3, seqlen_k=seqlen_k, dtype=torch.bfloat16
    )
    own = problem.shard(BlockCyclic(world_size, 4), rank)
    comm = Communicator()
    for _ in range(2):
        ring_pass_q_decode(own.q, own.k, own.v, group=comm)
    return comm.bytes_sent // 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_do_not_depend_on_the_context(world_size: int) -> None:
    rows = 4 // world_size * 6
    # Queries, the state and the result of a part, in each of world_size - 1 hops.
    part = rows * (64 * 2 + (64 * 4 + 4) + (64 * 2 + 4))
    for seqlen_k in (50, 500):
        sent = run_ranks(count_bytes, world_size, seqlen_k)
        assert sent == [(world_size - 1) * part] * world_size


def overlap(rank: int, world_size: int) -> tuple[list[int], int]:
    """Counts transfers that are under way while a rank attends."""
    from tree_attention.baselines import ring_pass_q

    problem = make_problem(batch=3, seqlen_k=64)
    own = problem.shard(BlockCyclic(world_size, 8), rank)
    comm = Communicator()
    under_way = 0
    during: list[int] = []
    start_shift, finish = comm.link.start_shift, comm.link.finish

    def counting_start(*args: object) -> object:
        nonlocal under_way
        under_way += 1
        return start_shift(*args)

    def counting_finish(works: list[object], *args: object) -> None:
        nonlocal under_way
        finish(works, *args)
        under_way -= bool(works)

    def counting_decode(*args: object, **options: object) -> State:
        during.append(under_way)
        return lean_decode(*args, **options)

    comm.link.start_shift, comm.link.finish = counting_start, counting_finish
    ring_pass_q.lean_decode = counting_decode
    try:
        ring_pass_q_decode(own.q, own.k, own.v, group=comm)
    finally:
        ring_pass_q.lean_decode = lean_decode
    return during, under_way


def test_transfers_overlap_attention() -> None:
    # The check of the arguments, then hops with queries, queries and a state, and a state to come.
    assert run_ranks(overlap, 3) == [([0, 1, 2, 1], 0)] * 3


def refuse_arguments(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    problem = make_problem(seqlen_k=20)
    q, k, v = problem.q, problem.k, problem.v
    comm = Communicator(timeout=5.0)
    good = ring_pass_q_decode(q, k, v, group=comm)
    sent = comm.bytes_sent
    with pytest.raises(RuntimeError, match="lean_decode: q must have shape"):
        ring_pass_q_decode(q[0], k, v, group=comm)
    with pytest.raises(RuntimeError, match="lean_decode: key_layout must be"):
        ring_pass_q_decode(q, k, v, group=comm, key_layout=(0, 2, 1))
    with pytest.raises(RuntimeError, match="lean_decode: key_ranges must"):
        ring_pass_q_decode(q, k, v, torch.zeros(2, 1, 2), group=comm)
    assert comm.bytes_sent == sent
    assert_same_bits(ring_pass_q_decode(q, k, v, group=comm), good)


def test_arguments_are_refused_before_anything_is_sent() -> None:
    run_ranks(refuse_arguments, 2)


def test_without_process_group() -> None:
    problem = make_problem(seqlen_q=2, ranges="causal", dtype=torch.bfloat16)
    result = ring_pass_q_decode(problem.q, problem.k, problem.v, problem.key_ranges)
    assert_same_bits(result, lean_decode(problem.q, problem.k, problem.v, problem.key_ranges))
