# SPDX-License-Identifier: BSD-3-Clause
"""One rank alone that changes its call, or leaves one out: every rank learns which and why, long
before its deadline, and the communicator goes on."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks
from faults import AMPLE, KINDS, QUICK, SLACK, TIMEOUT, call, failure
from tiers import tiers, tiers_of
from tree_attention import (
    BlockCyclic,
    lean_decode,
    ring_decode,
    ring_pass_q_decode,
    tree_decode,
)
from tree_attention._loader import load
from tree_attention.exchange import Communicator
from tree_attention.hf.cache.shard import Shard
from tree_attention.hf.sampling import SynchronizeLogits

digest = load().digest


def assert_goes_on(comm: Communicator, kind: str = "all_gather") -> None:
    """The next equal calls of all ranks are right."""
    assert comm.failed is None
    for _ in range(2):
        o, _ = call(kind, comm)
    other, _ = call(kind, Communicator(timeout=AMPLE))
    assert torch.equal(o, other)


def change_alone(rank: int, world_size: int, kind: str, before: int, after: int) -> str:
    comm = Communicator(timeout=AMPLE)
    for seqlen_q in (after, before, before):
        call(kind, comm, seqlen_q)
    seconds, message = failure(call, kind, comm, after if rank == 1 else before)
    assert seconds < QUICK
    assert_goes_on(comm, kind)
    return message


@pytest.mark.parametrize("before,after", [(1, 3), (3, 1)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size,direct", tiers([(2, True), (3, False)], [(3, True)]))
def test_shape_changed_on_one_rank(
    world_size: int, direct: bool, kind: str, before: int, after: int
) -> None:
    """Gloo ends the process of a rank that receives more than it expects."""
    arguments = change_alone, world_size, kind, before, after
    for message in run_ranks(*arguments, direct=direct):
        assert f"(2, 4, {after}, 32) on rank 1, (2, 4, {before}, 32) on rank 0" in message


def add(comm: Communicator, count: int = 3) -> object:
    return comm.all_reduce(torch.ones(count))


def gather(comm: Communicator, dim: int = 0) -> object:
    return comm.all_gather(torch.ones(2, 2), (2,) * comm.world_size, dim)


def broadcast(comm: Communicator, count: int = 4) -> object:
    return SynchronizeLogits(comm)(torch.ones(1), torch.ones(1, count))


def move(comm: Communicator, length: int = 2) -> object:
    """One message, from rank 0 to rank 1."""
    x = torch.ones(length)
    receive, send = ({0: x}, {}) if comm.rank == 1 else ({}, {1: x} if comm.rank == 0 else {})
    return Shard(comm).exchange("move", (("length", length),), receive, send, x.device)


def agree(comm: Communicator, value: int = 1) -> object:
    return comm.agree((("value", value),))


def decode(comm: Communicator, **options: Any) -> object:
    return call("all_gather", comm, **options)


def determined(comm: Communicator, scale: float = 1.0, **options: Any) -> object:
    q, layout = torch.full((1, 2, 1, 8), scale), BlockCyclic(comm.world_size, 4)
    k = torch.ones(1, 1, layout.count(comm.rank, 21), 8)
    key_layout = layout.key_layout(comm.rank)
    return tree_decode(q, k, k, group=comm, deterministic=4, key_layout=key_layout, **options)


CHANGES: dict[str, tuple[Callable[[Communicator], object], Callable[[Communicator], object], str]]
CHANGES = {
    "softcap": (decode, lambda comm: decode(comm, softcap=2.0), "softcap is 2.0 on rank 1, 0.0"),
    "strategy": (decode, lambda comm: call("butterfly", comm), "strategy is butterfly on rank 1"),
    "one element more": (add, lambda comm: add(comm, 4), r"shape is \(4,\) on rank 1, \(3,\)"),
    "two phases": (add, lambda comm: add(comm, 1 << 17), r"shape is \(131072,\) on rank 1"),
    "one phase": (lambda comm: add(comm, 1 << 17), add, r"shape is \(3,\) on rank 1, \(131072,\)"),
    "dim": (gather, lambda comm: gather(comm, 1), "dim is 1 on rank 1, 0 on rank 0"),
    "logits": (broadcast, lambda comm: broadcast(comm, 5), r"\[1, 5\] on rank 1"),
    "length of a message": (move, lambda comm: move(comm, 3), "length is 3 on rank 1, 2 on rank 0"),
    "blocks": (determined, lambda comm: determined(comm, softcap=1.0), "softcap is 1.0 on rank 1"),
}
CALLS = {f.__name__: f for f in (decode, add, move, determined, agree)}
CHANGES |= {
    f"{new} after {old}": (
        CALLS[old],
        CALLS[new],
        r"(call|deterministic|num_heads_kv) is \w+ on rank 1, \w+ on rank 0",
    )
    for old, new in itertools.permutations(CALLS, 2)
    if old != "agree"  # whose ranks always compare
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(3)
def test_call_changed_on_one_rank(rank: int, world_size: int, change: str) -> None:
    repeated, changed, expected = CHANGES[change]
    comm = Communicator(timeout=AMPLE)
    for function in (changed, repeated, repeated):
        function(comm)
    seconds, message = failure(changed if rank == 1 else repeated, comm)
    assert seconds < QUICK and re.search(expected, message), message
    assert_goes_on(comm)


@on_ranks(2)
def test_strategies_are_changed_by_all_ranks_without_an_error(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    expected = call("all_gather", comm)
    for kind in (*KINDS, *reversed(KINDS)):
        assert torch.allclose(call(kind, comm)[0], expected[0], atol=1e-6)
        add(comm)


STEPS = 20


def attend(kind: str, comm: Communicator, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """`o` and `lse` of a step, which differ from others' in values alone, and the right `o`."""
    torch.manual_seed(step)
    q, keys = torch.randn(1, 4, 1, 8), torch.randn(comm.world_size, 1, 2, 5, 8)
    k = torch.cat(list(keys), 2)
    function = {"ring": ring_decode, "ring of queries": ring_pass_q_decode}.get(kind, tree_decode)
    options = {"strategy": kind} if function is tree_decode else {}
    o, lse = function(q, keys[comm.rank], keys[comm.rank], group=comm, **options)
    return o, lse, lean_decode(q, k, k)[0]


@pytest.mark.parametrize("kind", tiers_of(KINDS, quick=("all_gather", "ring")))
@on_ranks(3)
def test_step_left_out_by_one_rank(rank: int, world_size: int, kind: str) -> None:
    comm = Communicator(timeout=AMPLE)
    for step in range(5):
        o, _, expected = attend(kind, comm, step)
        assert torch.allclose(o, expected, atol=1e-5)
    skipped = int(rank == 1)
    for step in range(5, STEPS - 1):
        seconds, message = failure(attend, kind, comm, step + skipped)
        assert seconds < QUICK and "the queries of rank 1 are not those of rank 0" in message
    o, _, expected = attend(kind, comm, STEPS)
    assert torch.allclose(o, expected, atol=1e-5) and comm.failed is None


@on_ranks(2)
def test_step_with_blocks_left_out_by_one_rank(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    determined(comm)
    determined(comm)
    _, message = failure(determined, comm, scale=1.0 + rank)
    assert "the queries of rank 1 are not those of rank 0" in message
    determined(comm)


@pytest.mark.parametrize("kind", ["all_gather", "ring", "ring of queries"])
@on_ranks(2)
def test_positions_of_queries_differ(rank: int, world_size: int, kind: str) -> None:
    comm = Communicator(timeout=AMPLE)
    options = {"alibi_slopes": torch.ones(4)}
    for _ in range(2):
        call(kind, comm, query_positions=torch.tensor([[7], [9]]), **options)
    moved = torch.tensor([[7], [9 + rank]])
    seconds, message = failure(call, kind, comm, query_positions=moved, **options)
    assert seconds < QUICK and "query_positions of rank 1 are not those of rank 0" in message
    assert_goes_on(comm, kind)


@pytest.mark.parametrize("kind", ["all_gather", "ring", "ring of queries"])
@on_ranks(2)
def test_queries_that_differ_by_rounding(rank: int, world_size: int, kind: str) -> None:
    """Processors of two kinds may round alike in one layer and not in the next."""
    comm = Communicator(timeout=AMPLE)
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 6, 64)
    function = {"ring": ring_decode, "ring of queries": ring_pass_q_decode}.get(kind, tree_decode)
    expected = lean_decode(q, k, k)[0]  # twice the same keys on two ranks change no weights
    function(q, k, k, group=comm)
    rounded = q * (1 + 5e-4 * rank)
    with pytest.warns(RuntimeWarning, match="the queries of the ranks differ by rounding"):
        o, _ = function(rounded, k, k, group=comm)
    assert torch.allclose(o, expected, atol=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(function(rounded, k, k, group=comm)[0], o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_sees_every_value_and_no_stride(dtype: torch.dtype) -> None:
    q = torch.randn(2, 3, 5, 7).to(dtype)
    expected = digest([q])
    for permutation in itertools.permutations(range(4)):
        inverse = [permutation.index(i) for i in range(4)]
        assert digest([q.permute(permutation).contiguous().permute(inverse)]) == expected
    found = {expected}
    for i in range(q.numel()):
        changed = q.clone()
        changed.view(-1)[i] += 8.0
        found.add(digest([changed]))
        changed.view(-1)[i] = -q.view(-1)[i]
        found.add(digest([changed]))
    found |= {digest([q, torch.tensor([[1]])]), digest([q, torch.tensor([[2]])]), digest([-q])}
    assert len(found) == 2 * q.numel() + 4
    assert digest([q[:0]]) == digest([]) == digest([q[..., :0]])


@pytest.mark.parametrize("head_dim", [1, 40, 80, 128])
def test_digest_of_large_queries_sees_every_value_and_no_stride(head_dim: int) -> None:
    """Rows are packed in a buffer that they do not fill evenly, and are not copied as a whole."""
    q = torch.randn(2, 3, 700, head_dim)
    expected = digest([q])
    views = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([q, -q], -2)[..., 0, :],  # every other row
        torch.stack([q, -q], -1)[..., 0],  # every other value
        q.flip(0).flip(0).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    ]
    assert [digest([view]) for view in views] == [expected] * len(views)
    found = {expected}
    places = torch.randint(q.numel(), (100,)).unique().tolist()
    for place in places:
        changed = views[0].clone(memory_format=torch.preserve_format)
        changed[tuple(map(int, torch.unravel_index(torch.tensor(place), q.shape)))] += 1.0
        found.add(digest([changed]))
    swapped = q.clone()
    swapped[0, 0, [5, 6]] = q[0, 0, [6, 5]]
    assert len(found | {digest([swapped])}) == len(places) + 2
    one = q[:1, :1, :1].expand(2, 3, 700, head_dim)
    assert digest([one]) == digest([one.contiguous()])


def call_in_another_order(rank: int, world_size: int) -> str:
    one, other = Communicator(timeout=AMPLE), Communicator(timeout=AMPLE)
    for comm in (one, other) * 2:
        comm.all_reduce(torch.ones(4))
    comm, x = other if rank else one, torch.full((4,), 1.0 + rank)
    return failure(comm.all_reduce, x, timeout=TIMEOUT)[1]


@pytest.mark.parametrize("direct", tiers([False], [True]))
def test_messages_of_two_communicators_of_a_group_do_not_meet(direct: bool) -> None:
    """Gloo would end a process where they are of different lengths."""
    for message in run_ranks(call_in_another_order, 2, direct=direct, fresh=True):
        assert f"no answer within {TIMEOUT:g} s" in message


def stall_behind_a_ring(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    call("ring of queries", comm)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has failed"], timedelta(seconds=2 * AMPLE))
        return
    seconds, _ = failure(call, "all_gather", comm, timeout=TIMEOUT)
    store.set("rank 0 has failed", "")
    assert seconds < TIMEOUT + SLACK


@pytest.mark.deep
def test_a_call_behind_a_ring_of_queries_has_its_own_timeout() -> None:
    run_ranks(stall_behind_a_ring, 2, fresh=True)
