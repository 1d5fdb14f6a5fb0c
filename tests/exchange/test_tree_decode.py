# SPDX-License-Identifier: BSD-3-Clause
"""tree_decode: exact on any shards, the same bits on every rank, and nothing sent that grows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks
from faults import AMPLE
from helpers import assert_same_bits, make_problem, paginate
from sharded import CASES, LAYOUTS, WORLDS, make_case, merged
from tiers import tiers
from tree_attention import BlockCyclic, lean_decode, merge_states, strategies, tree_decode
from tree_attention.exchange import Communicator
from tree_attention.exchange.transport.buffers import CALL_ID_BYTES

State = tuple[Tensor, Tensor]


def decode_case(rank: int, world_size: int, case: str, layout: str, strategy: str) -> State:
    problem, shards = make_case(case, layout, world_size)
    own = shards[rank]
    o, lse = tree_decode(own.q, own.k, own.v, own.key_ranges, strategy=strategy, **own.options)
    assert o.dtype == own.q.dtype
    problem.check(o, lse)
    if case == "rows without keys":
        assert (lse == -torch.inf).any() and (lse > -torch.inf).any()
        assert not o[lse == -torch.inf].any()
    if strategy == "auto":
        assert_same_bits((o, lse), merged(shards, o.dtype))
    return o, lse


def assert_ranks_agree(results: list[State]) -> None:
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_exact_and_same_bits(case: str, layout: str, world_size: int) -> None:
    assert_ranks_agree(run_ranks(decode_case, world_size, case, layout, "auto"))


@pytest.mark.parametrize("strategy", strategies())
@pytest.mark.parametrize("case", ["one query", "rows without keys", "no keys", "ragged batch"])
def test_strategies(case: str, strategy: str) -> None:
    assert_ranks_agree(run_ranks(decode_case, 3, case, "uneven", strategy))


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_payload_and_sharded_heads(rank: int, world_size: int) -> None:
    _, shards = make_case("ragged batch", "uneven", world_size)
    own, dtype = shards[rank], shards[rank].q.dtype
    inputs = own.q, own.k, own.v, own.key_ranges
    whole = tree_decode(*inputs, **own.options)
    sharded = tree_decode(*inputs, head_sharded=True, **own.options)
    chunks = [x.chunk(world_size, 1) for x in whole]
    assert len(chunks[0]) == world_size
    assert_same_bits(sharded, tuple(chunk[rank] for chunk in chunks))
    # The kernel itself rounds its o into the send buffer.
    parts = [s.run(out_dtype=torch.bfloat16) for s in shards]
    expected = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)), out_dtype=dtype)
    for strategy in ("auto", "hierarchical", "butterfly"):
        options = {"payload_dtype": torch.bfloat16, "strategy": strategy}
        assert_same_bits(tree_decode(*inputs, **options, **own.options), expected)
    with pytest.raises(ValueError, match="strategy must be one of auto, two_phase, got 'butterfl"):
        tree_decode(*inputs, head_sharded=True, strategy="butterfly")


def decode_pages(rank: int, world_size: int) -> State:
    torch.manual_seed(2)
    problem = make_problem(seqlen_q=2, seqlen_k=100, ranges="causal")
    shards = [problem.shard(BlockCyclic(world_size, 8), r) for r in range(world_size)]
    expected = merged(shards, torch.float32)
    own = shards[rank]
    k, v, table = paginate(own.k, own.v, 16, per_head=rank % 2 == 0)
    result = tree_decode(own.q, k, v, own.key_ranges, page_table=table)
    problem.check(*result)
    assert_same_bits(result, expected)
    return result


def test_pages() -> None:
    assert_ranks_agree(run_ranks(decode_pages, 2))


def decode_by_shares(rank: int, world_size: int, names: list[str]) -> list[State]:
    """One rank without keys, and the others with runs of unequal lengths."""
    layout, found = BlockCyclic(world_size, 8, (*range(world_size - 1, 0, -1), 0)), []
    for name in names:
        torch.manual_seed(1)
        problem = make_problem(**CASES[name])
        shards = [problem.shard(layout, r) for r in range(world_size)]
        assert shards[-1].k.shape[2] == 0
        own = shards[rank]
        result = tree_decode(own.q, own.k, own.v, own.key_ranges, **own.options)
        problem.check(*result)
        assert_same_bits(result, merged(shards, own.q.dtype))
        found.append(result)
    return found


@pytest.mark.parametrize("world_size", tiers([3], [2, 4]))
def test_keys_by_shares(world_size: int) -> None:
    for results in zip(*run_ranks(decode_by_shares, world_size, list(CASES)), strict=True):
        assert_ranks_agree(list(results))


def decode_sequence(rank: int, world_size: int, seqlen_k: int, strategy: str) -> tuple[int, int]:
    torch.manual_seed(3)
    problem = make_problem(seqlen_k=seqlen_k)
    own = problem.shard(BlockCyclic(world_size, 16), rank)
    comm = Communicator()
    for _ in range(2):
        tree_decode(own.q, own.k, own.v, group=comm, strategy=strategy)
    assert comm.seconds > 0
    rows = own.q.shape[0] * own.q.shape[1]
    return comm.bytes_sent // 2, 4 * rows * (own.v.shape[3] + 1)


@pytest.mark.parametrize("seqlen_k", [100, 1000])
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_do_not_depend_on_the_context(world_size: int, seqlen_k: int) -> None:
    for sent, message in run_ranks(decode_sequence, world_size, seqlen_k, "all_gather"):
        assert sent == (world_size - 1) * message
    for sent, message in run_ranks(decode_sequence, world_size, seqlen_k, "three_allreduce"):
        # Ring all-reduces of numerators, denominators and maxima.
        row_bytes = message // (64 + 1)
        sizes = (64 * row_bytes, row_bytes, row_bytes + CALL_ID_BYTES)
        assert sent == sum(2 * (world_size - 1) * size // world_size for size in sizes)


@on_ranks(3)
def test_subgroups(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 1])]
    torch.manual_seed(4)
    problem = make_problem()
    for i, members in enumerate(([0, 1], [1, 2])):
        if rank in members:
            group = pairs[i]
            assert dist.get_world_size(group) == 2
            own = problem.shard(BlockCyclic(2, 16), group.rank())
            problem.check(*tree_decode(own.q, own.k, own.v, group=group))
        else:
            with pytest.raises(ValueError, match="group must be a process group that this process"):
                tree_decode(problem.q, problem.k, problem.v, group=pairs[i])
    for pair in pairs:
        if pair != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(pair)


@on_ranks(2)
def test_arguments_are_refused_before_anything_is_sent(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    problem = make_problem(seqlen_k=20)
    q, k, v = problem.q, problem.k, problem.v
    comm = Communicator(timeout=AMPLE)
    good = tree_decode(q, k, v, group=comm)
    sent = comm.bytes_sent
    with pytest.raises(ValueError, match="strategy must be one of auto, all_gather, butter"):
        tree_decode(q, k, v, group=comm, strategy="ring")
    with pytest.raises(ValueError, match="lean_decode: q must have shape"):
        tree_decode(q[0], k, v, group=comm)
    with pytest.raises(ValueError, match="lean_decode: v must have shape"):
        tree_decode(q, k, v[0], group=comm)
    with pytest.raises(ValueError, match="lean_decode: "):
        tree_decode(q, k[..., :32], v, group=comm)
    assert comm.bytes_sent == sent
    # All ranks refused alike, so they are in step and go on.
    assert_same_bits(tree_decode(q, k, v, group=comm), good)


def test_without_process_group() -> None:
    problem = make_problem(seqlen_q=2, ranges="causal", dtype=torch.bfloat16)
    result = tree_decode(problem.q, problem.k, problem.v, problem.key_ranges)
    assert_same_bits(result, lean_decode(problem.q, problem.k, problem.v, problem.key_ranges))


@on_ranks(2)
def test_empty_batch(rank: int, world_size: int) -> None:
    q, kv = torch.empty(0, 4, 1, 64), torch.empty(0, 2, 10 + rank, 64)
    o, lse = tree_decode(q, kv, kv)
    assert o.shape == (0, 4, 1, 64) and lse.shape == (0, 4, 1)
    state = torch.empty(2, 0, 4, 1, 64), torch.empty(2, 0, 4, 1)
    assert_same_bits((o, lse), merge_states(*state))
