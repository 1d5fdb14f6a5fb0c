# SPDX-License-Identifier: BSD-3-Clause
"""ring_pass_q_decode: only queries and states travel, at a cost without the context."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from helpers import make_problem, paginate
from tiers import by_world
from tree_attention import BlockCyclic, ring_pass_q_decode
from tree_attention.decode_call import DecodeCall
from tree_attention.exchange import Communicator

State = tuple[Tensor, Tensor]


@by_world([], [2, 3, 5])
@on_ranks()
def test_any_split(rank: int, world_size: int) -> None:
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


def queries_travel(rank: int, world_size: int) -> State:
    """Each rank reads its own part of q only; the others' parts come by the ring."""
    torch.manual_seed(1)
    problem = make_problem(batch=1, num_heads_kv=3, group_size=2, seqlen_k=40)
    own = problem.shard(BlockCyclic(world_size, 4), rank)
    q = torch.full_like(own.q, torch.nan)
    q[:, 2 * rank : 2 * rank + 2] = own.q[:, 2 * rank : 2 * rank + 2]
    with mock.patch.object(DecodeCall, "queries", ()):  # which would not agree
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


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_do_not_depend_on_the_context(world_size: int) -> None:
    rows = 4 // world_size * 6
    # Queries, the state and the result of a part, in each of world_size - 1 hops.
    part = rows * (64 * 2 + (64 * 4 + 4) + (64 * 2 + 4))
    for seqlen_k in (50, 500):
        sent = run_ranks(count_bytes, world_size, seqlen_k)
        assert sent == [(world_size - 1) * part] * world_size
