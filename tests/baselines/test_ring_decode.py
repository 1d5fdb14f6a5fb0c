# SPDX-License-Identifier: BSD-3-Clause
"""ring_decode: the bits of tree_decode, at a cost that grows with the context."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from helpers import assert_same_bits, make_problem, paginate
from tree_attention import BlockCyclic, ring_decode, tree_decode
from tree_attention.baselines import MANIFEST_BYTES
from tree_attention.exchange import Communicator

State = tuple[Tensor, Tensor]


@pytest.mark.deep
@on_ranks(3)
def test_shards_that_differ_in_kind(rank: int, world_size: int) -> None:
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


@pytest.mark.deep
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


@pytest.mark.deep
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
