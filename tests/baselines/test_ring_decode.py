# SPDX-License-Identifier: BSD-3-Clause
"""ring_decode: the same result to the bit as tree_decode, at a cost that grows with the context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run_ranks
from helpers import assert_same_bits, make_problem, paginate
from sharded import CASES, LAYOUTS, WORLDS, make_case, merged
from tree_attention import BlockCyclic, lean_decode, ring_decode, tree_decode
from tree_attention.baselines.ring import MANIFEST_BYTES
from tree_attention.exchange import Communicator

State = tuple[Tensor, Tensor]


def decode_case(rank: int, world_size: int, case: str, layout: str) -> State:
    problem, shards = make_case(case, layout, world_size)
    own = shards[rank]
    result = ring_decode(own.q, own.k, own.v, own.key_ranges, **own.options)
    assert result[0].dtype == own.q.dtype
    problem.check(*result)
    assert_same_bits(result, merged(shards, own.q.dtype))
    return result


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_exact_and_same_bits(case: str, layout: str, world_size: int) -> None:
    results = run_ranks(decode_case, world_size, case, layout)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def decode_unlike_shards(rank: int, world_size: int) -> None:
    """Ranks differ in what may differ: pages per head, shared or none, key ranges or none."""
    torch.manual_seed(2)
    problem = make_problem(seqlen_k=90)
    own = problem.shard(BlockCyclic(world_size, 8), rank)
    k, v, options = own.k, own.v, {}
    if rank != 1:
        options["key_ranges"] = torch.tensor([0, k.shape[2]], dtype=torch.int32).repeat(2, 1, 1)
        k, v, table = paginate(k, v, 16, per_head=rank == 2)
        options["page_table"] = table
    ring = ring_decode(own.q, k, v, **options)
    problem.check(*ring)
    assert_same_bits(ring, tree_decode(own.q, k, v, **options))


def test_shards_that_differ_in_kind() -> None:
    run_ranks(decode_unlike_shards, 3)


def decode_nothing(rank: int, world_size: int) -> None:
    """No sequences or no queries, between calls that have some."""
    kv = torch.ones(2, 2, 5, 8)
    for batch, seqlen_q in ((2, 1), (0, 1), (2, 0), (0, 0), (2, 1)):
        q = torch.ones(batch, 4, seqlen_q, 8)
        o, lse = ring_decode(q, kv[:batch], kv[:batch])
        assert o.shape == q.shape and lse.shape == q.shape[:3] and (o == 1).all()


def test_calls_without_rows() -> None:
    run_ranks(decode_nothing, 3)


def decode_with_threads(rank: int, world_size: int, num_threads: list[int]) -> State:
    torch.manual_seed(2)
    problem = make_problem(batch=1, num_heads_kv=1, seqlen_k=6000)
    own = problem.shard(BlockCyclic(world_size, 64), rank)
    splits = [own.run(num_workers=workers)[0] for workers in (1, 2)]
    assert not torch.equal(*splits)  # or the number of threads could not matter
    torch.set_num_threads(num_threads[rank])
    try:
        ring = ring_decode(own.q, own.k, own.v)
        tree = tree_decode(own.q, own.k, own.v)
    finally:
        torch.set_num_threads(1)
    if len(set(num_threads)) == 1:
        assert_same_bits(ring, tree)
    return ring


@pytest.mark.parametrize("num_threads", [[2, 2], [1, 2], [3, 1]])
def test_number_of_threads(num_threads: list[int]) -> None:
    assert_same_bits(*run_ranks(decode_with_threads, 2, num_threads))


def grow_and_count(rank: int, world_size: int) -> list[int]:
    """A cache to which one rank appends a key per step, as in decoding."""
    torch.manual_seed(3)
    problem = make_problem(seqlen_k=41, group_size=3, dtype=torch.bfloat16)
    comm = Communicator()
    sent = []
    for length in range(37, 42):
        whole = replace(problem, k=problem.k[:, :, :length], v=problem.v[:, :, :length])
        own = whole.shard(BlockCyclic(world_size, 4), rank)
        before = comm.bytes_sent
        whole.check(*ring_decode(own.q, own.k, own.v, group=comm))
        sent.append(comm.bytes_sent - before)
    return sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_linear_in_the_context(world_size: int) -> None:
    manifests = (world_size - 1) * MANIFEST_BYTES
    per_key = 2 * 2 * 2 * 64 * 2  # k and v, batch 2, two key heads (not six), head_dim 64, bfloat16
    for rank, sent in enumerate(run_ranks(grow_and_count, world_size)):
        for length, count in zip(range(37, 42), sent, strict=True):
            layout = BlockCyclic(world_size, 4)
            # A rank sends on every shard but its next neighbour's, which comes to it last.
            held = [layout.count(r, length) for r in range(world_size)]
            passed = length - held[(rank + 1) % world_size]
            assert count == manifests + passed * per_key


def refuse_arguments(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    problem = make_problem(seqlen_k=20)
    q, k, v = problem.q, problem.k, problem.v
    comm = Communicator(timeout=5.0)
    good = ring_decode(q, k, v, group=comm)
    sent = comm.bytes_sent
    with pytest.raises(RuntimeError, match="lean_decode: q must have shape"):
        ring_decode(q[0], k, v, group=comm)
    with pytest.raises(RuntimeError, match="lean_decode: key_layout must be"):
        ring_decode(q, k, v, group=comm, key_layout=(0, 2, 1))
    with pytest.raises(RuntimeError, match="lean_decode: key_ranges must"):
        ring_decode(q, k, v, torch.zeros(2, 1, 2), group=comm)
    assert comm.bytes_sent == sent
    assert_same_bits(ring_decode(q, k, v, group=comm), good)


def test_arguments_are_refused_before_anything_is_sent() -> None:
    run_ranks(refuse_arguments, 2)


def overlap(rank: int, world_size: int) -> tuple[int, int]:
    """Counts transfers that are under way while a rank attends."""
    from tree_attention.baselines import ring

    problem = make_problem(seqlen_k=64)
    own = problem.shard(BlockCyclic(world_size, 8), rank)
    started, attended_during = [], 0
    comm = Communicator()
    start_shift, finish = comm.link.start_shift, comm.link.finish

    def counting_start(*args: object) -> list[dist.Work]:
        works = start_shift(*args)
        started.append(works)
        return works

    def counting_finish(works: list[dist.Work], *args: object) -> None:
        finish(works, *args)
        started.remove(works)

    def counting_decode(*args: object, **options: object) -> State:
        nonlocal attended_during
        attended_during += len(started)
        return lean_decode(*args, **options)

    comm.link.start_shift, comm.link.finish = counting_start, counting_finish
    ring.lean_decode = counting_decode
    try:
        ring_decode(own.q, own.k, own.v, group=comm)
    finally:
        ring.lean_decode = lean_decode
    return attended_during, len(started)


def test_transfers_overlap_attention() -> None:
    # Every hop but the last, which receives nothing, attends while one transfer is under way.
    assert run_ranks(overlap, 3) == [(2, 0)] * 3
