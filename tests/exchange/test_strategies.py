# SPDX-License-Identifier: BSD-3-Clause
"""All strategies: the same bits on any world, the stated operations and bytes, no allocations."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks
from helpers import assert_same_bits
from tiers import by_world, tiers
from tree_attention import ExchangeError, merge_states, strategies
from tree_attention.exchange import Communicator, Link
from tree_attention.exchange.strategies import STRATEGIES
from tree_attention.exchange.strategies.butterfly import levels
from tree_attention.exchange.transport.buffers import CALL_ID_BYTES

CPU = torch.device("cpu")
NAN, INF = torch.nan, torch.inf
CANONICAL = [name for name in strategies() if STRATEGIES[name].is_canonical]
# Worlds as the node of each rank. The quick ones: one node, a power of two or not, equal nodes, and
# nodes of several sizes.
WORLDS = tiers(
    ["a", "aab"],
    [
        "aa",
        "aabb",
        "ab",
        "aaa",
        "aaaa",
        "aaaab",
        "aaabbb",
        "abab",
        "aaab",
        "abcde",
        "aaaaaa",
        "aabbcc",
        "aaaabb",
        "aaaaaaa",
        "aaaabbc",
    ],
)
SHAPES = [(1, 1, 1, 8), (2, 4, 1, 16), (1, 3, 2, 7), (3, 5, 1, 24), (2, 8, 3, 5)]

State = tuple[Tensor, Tensor]


def states_of_ranks(seed: int, world_size: int, shape: tuple[int, ...]) -> State:
    """Some rows empty with uninitialised o, some on all ranks; a rank may be empty altogether."""
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(world_size, *shape, generator=generator)
    lse = torch.randn(world_size, *shape[:-1], generator=generator) * 10 ** (seed % 3)
    empty = torch.rand(lse.shape, generator=generator) < 0.25
    empty |= torch.rand(lse.shape[1:], generator=generator) < 0.1
    empty[seed % world_size] |= seed % 2 == 1
    o[empty], lse[empty] = NAN, -INF
    return o, lse


def exchange_every_way(rank: int, world_size: int, nodes: str) -> None:
    comm = Communicator(nodes=nodes)
    seed = 0
    for shape in SHAPES:
        for out_dtype in (torch.float32, torch.bfloat16):
            for payload_dtype in (torch.float32, torch.bfloat16):
                seed += 1
                o, lse = states_of_ranks(seed, world_size, shape)
                # Every rank merges the rounded copy, also of its own state, and rounds no more.
                sent = o.to(payload_dtype) if world_size > 1 else o
                expected = merge_states(sent, lse, out_dtype=out_dtype)
                for strategy in (*CANONICAL, "auto"):
                    options = {"out_dtype": out_dtype, "payload_dtype": payload_dtype}
                    result = comm.all_merge_states(o[rank], lse[rank], strategy=strategy, **options)
                    assert_same_bits(result, expected)
                sharded = comm.all_merge_states(o[rank], lse[rank], head_sharded=True, **options)
                own = (x.tensor_split(world_size, 1)[rank] for x in expected)
                assert_same_bits(sharded, tuple(own))
                counts = [0] * world_size  # most of the heads, a head, and none
                for head in range(shape[1]):
                    counts[seed % world_size if head else -1] += 1
                for _ in range(2):
                    sharded = comm.all_merge_states(
                        o[rank], lse[rank], head_sharded=True, head_counts=counts, **options
                    )
                    assert_same_bits(sharded, tuple(x.split(counts, 1)[rank] for x in expected))


@pytest.mark.parametrize("nodes", WORLDS)
def test_same_bits_in_every_way(nodes: str) -> None:
    run_ranks(exchange_every_way, len(nodes), nodes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@on_ranks(3, fresh=True)
def test_tensors_of_a_device_over_gloo(rank: int, world_size: int) -> None:
    comm = Communicator(nodes="aab")
    o, lse = (x.cuda() for x in states_of_ranks(3, world_size, (2, 4, 1, 16)))
    for payload_dtype in (torch.float32, torch.bfloat16):
        expected = merge_states(o.to(payload_dtype), lse, out_dtype=torch.bfloat16)
        options = {"payload_dtype": payload_dtype, "out_dtype": torch.bfloat16}
        for strategy in (*CANONICAL, *CANONICAL):
            assert_same_bits(
                comm.all_merge_states(o[rank], lse[rank], strategy=strategy, **options), expected
            )
        own = tuple(x.tensor_split(world_size, 1)[rank] for x in expected)
        sharded = comm.all_merge_states(o[rank], lse[rank], head_sharded=True, **options)
        assert_same_bits(sharded, own)


@on_ranks(2)
def test_no_rows(rank: int, world_size: int) -> None:
    comm = Communicator()
    for strategy in strategies():
        o, lse = comm.all_merge_states(
            torch.ones(2, 0, 1, 8), torch.ones(2, 0, 1), strategy=strategy
        )
        assert o.shape == (2, 0, 1, 8) and lse.shape == (2, 0, 1)
    for shape in ((0, 4, 1, 8), (2, 0, 1, 8)):
        o, lse = comm.all_merge_states(torch.ones(shape), torch.ones(shape[:-1]), head_sharded=True)
        heads = shape[1] // 2
        assert o.shape == (shape[0], heads, 1, 8) and lse.shape == (shape[0], heads, 1)
    assert comm.bytes_sent == 0


@contextmanager
def counted_operations(world_size: int) -> Iterator[tuple[Counter[str], list[int]]]:
    """What goes through the process group's own methods: calls by name, and bytes sent."""
    calls: Counter[str] = Counter()
    sent = [0]
    share = {
        "send": lambda tensors, *_: tensors[0].nbytes - CALL_ID_BYTES,
        "allreduce": lambda tensors, *_: 0,  # as many as the library likes
    }
    for name in ("all_gather_single", "_allgather_base"):
        share[name] = lambda receive, send, *_: (world_size - 1) * send.nbytes
    others = ("allgather", "alltoall", "broadcast", "reduce", "gather", "scatter", "barrier")
    share |= dict.fromkeys(others, lambda *_: 0)
    with ExitStack() as stack:
        for name, bytes_of in share.items():
            original = getattr(dist.ProcessGroup, name, None)
            if original is None:
                continue  # of another torch

            def counting(
                self: dist.ProcessGroup,
                *arguments: Any,
                name: str = name,
                original: Any = original,
                bytes_of: Any = bytes_of,
            ) -> Any:
                calls[name.replace("_single", "").strip("_").replace("_base", "")] += 1
                sent[0] += bytes_of(*arguments)
                return original(self, *arguments)

            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, counting))
        yield calls, sent


def count(
    rank: int, world_size: int, nodes: str, strategy: str, shape: tuple[int, ...], options: Any
) -> tuple[dict[str, int], int]:
    comm = Communicator(nodes=nodes)
    o, lse = states_of_ranks(0, world_size, shape)
    counts = []
    # A changed call first repeats the one before.
    comm.all_merge_states(o[rank], lse[rank], strategy=strategy, **options)
    for _ in range(2):
        before = comm.bytes_sent, comm.link.num_operations
        with counted_operations(world_size) as (calls, sent):
            comm.all_merge_states(o[rank], lse[rank], strategy=strategy, **options)
        counts.append((dict(calls), sent[0]))
        if "allreduce" not in calls:
            assert comm.bytes_sent - before[0] == sent[0]
            operations = calls["all_gather"] + calls["allgather"]
            rounds = comm.link.num_operations - before[1] - operations
            assert rounds >= 1 if calls["send"] else rounds == 0
    assert counts[0] == counts[1]
    return counts[0]


def run_counting(world_size: int, *args: Any) -> list[tuple[dict[str, int], int]]:
    return run_ranks(count, world_size, *args, direct=False)


@on_ranks(4, direct=False)
def test_everybody_begins_with_another_rank(rank: int, world_size: int) -> None:
    comm = Communicator(nodes="a" * world_size)
    o, lse = states_of_ranks(0, world_size, (1, 3, 1, 8))
    for strategy in ("all_gather", "hierarchical", "two_phase"):
        comm.all_merge_states(o[rank], lse[rank], strategy=strategy)
        targets = []
        original = dist.ProcessGroup.send

        def sending(*arguments: Any, targets: list[int] = targets, original: Any = original) -> Any:
            targets.append(arguments[2])
            return original(*arguments)

        with mock.patch.object(dist.ProcessGroup, "send", sending):
            comm.all_merge_states(o[rank], lse[rank], strategy=strategy)
        others = [(rank + i) % world_size for i in range(1, world_size)]
        assert targets in (others, others * 2), strategy
    # Another library than Gloo gathers by itself.
    comm = Communicator()
    with mock.patch.object(Link, "transport_device", return_value=torch.device("cuda")):
        gather = comm.link.gather(torch.zeros(world_size, 9), torch.ones(9), CPU)
    before = comm.link.num_operations
    with counted_operations(world_size) as (calls, _):
        gather.post()
        gather.run(time.monotonic() + 20.0)
    assert not calls["send"] and sum(calls.values()) == 1
    assert comm.link.num_operations == before + 1


def size(rows: int, head_dim: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a message, padding aside."""
    return rows * (head_dim * dtype.itemsize + 4)


BF16 = torch.bfloat16


@by_world([2, 3], [5])
@pytest.mark.parametrize("payload,out", [(torch.float32, torch.float32), (BF16, BF16)])
def test_bytes_of_collectives(world_size: int, payload: torch.dtype, out: torch.dtype) -> None:
    shape, rows, dim = (2, 4, 1, 16), 8, 16
    options = {"payload_dtype": payload, "out_dtype": out}
    others, part = world_size - 1, math.ceil(rows / world_size)
    nodes = "a" * world_size
    # Over Gloo an all-gather is a message to each other rank, and so is an all-to-all.
    for calls, sent in run_counting(world_size, nodes, "all_gather", shape, options):
        assert calls == {"send": others} and sent == others * size(rows, dim, payload)
    for calls, sent in run_counting(world_size, nodes, "two_phase", shape, options):
        assert calls == {"send": 2 * others}
        assert sent == others * (size(part, dim, payload) + size(part, dim, out))
    options["head_sharded"] = True
    heads = math.ceil(4 / world_size)
    for calls, sent in run_counting(world_size, nodes, "two_phase", shape, options):
        assert calls == {"send": others} and sent == others * size(2 * heads, dim, payload)
    counts = options["head_counts"] = [3, 1, *(0 for _ in range(world_size - 2))]
    results = run_counting(world_size, nodes, "two_phase", shape, options)
    for (calls, sent), count in zip(results, counts, strict=True):
        to_others = size(2 * (4 - count), dim, payload)
        assert calls == {"send": others} and sent == to_others  # no padding to the longest


@pytest.mark.parametrize("world_size", [2, 3])
def test_number_of_all_reduces(world_size: int) -> None:
    nodes = "a" * world_size
    results = run_counting(world_size, nodes, "three_allreduce", (2, 4, 1, 16), {})
    assert [calls for calls, _ in results] == [{"allreduce": 3}] * world_size


@pytest.mark.parametrize(
    "nodes,subtree",
    [("aabb", 2), ("aaaa", 4), ("ab", 1), ("aabbcc", 2), ("aaabbb", 1), ("aaaaaa", 2)],
)
def test_bytes_of_hierarchical(nodes: str, subtree: int) -> None:
    """Between nodes a rank sends its part of a state to each other node, however many ranks."""
    shape, rows, dim, world_size = (3, 4, 1, 16), 12, 16, len(nodes)
    options = {"payload_dtype": BF16, "out_dtype": BF16}
    part, near, far = math.ceil(rows / subtree), subtree - 1, world_size // subtree - 1
    for calls, sent in run_counting(world_size, nodes, "hierarchical", shape, options):
        assert calls == {"send": 2 * near + far}
        # Leaves and results are rounded, what nodes merged is not.
        between = size(part, dim, BF16 if subtree == 1 else torch.float32)
        assert sent == 2 * near * size(part, dim, BF16) + far * between


@by_world(range(2, 7), [7])
def test_bytes_of_butterfly(world_size: int) -> None:
    shape, rows, dim = (2, 4, 1, 16), 8, 16
    options = {"payload_dtype": BF16, "out_dtype": BF16}
    results = run_counting(world_size, "a" * world_size, "butterfly", shape, options)
    # A rank reads one state per level at which its block has a neighbour; only leaves are rounded.
    reads = [[step.level for step in levels(rank, world_size)] for rank in range(world_size)]
    leaf, partial = size(rows, dim, BF16), size(rows, dim)
    total = sum(partial if level else leaf for read in reads for level in read)
    assert sum(sent for _, sent in results) == total
    assert sum(calls["send"] for calls, _ in results) == sum(map(len, reads))
    if world_size in (2, 4):
        log2 = int(math.log2(world_size))
        assert results == [({"send": log2}, leaf + (log2 - 1) * partial)] * world_size


@pytest.mark.parametrize("world_size", [*range(1, 71), 127, 128])
def test_butterfly_follows_the_canonical_order(world_size: int) -> None:
    """Played without a network: sets of ranks in place of states, merged by neighbours only."""
    held = [(rank, rank + 1) for rank in range(world_size)]
    steps = [{s.level: s for s in levels(rank, world_size)} for rank in range(world_size)]
    for level in range((world_size - 1).bit_length()):
        after = list(held)
        for rank in range(world_size):
            if level not in steps[rank]:
                continue
            step = steps[rank][level]
            assert rank in steps[step.source][level].readers
            assert all(steps[reader][level].source == rank for reader in step.readers)
            lower, upper = held[rank], held[step.source]
            if step.is_upper:
                lower, upper = upper, lower
            # Aligned, the lower one full: a node of the canonical tree.
            assert lower[1] == upper[0] and lower[0] % (2 << level) == 0
            assert lower[1] - lower[0] == 1 << level >= upper[1] - upper[0]
            after[rank] = (lower[0], upper[1])
        held = after
    assert held == [(0, world_size)] * world_size


@by_world([3], [6])
@on_ranks(fresh=True)
def test_debugging_mode_of_torch(rank: int, world_size: int) -> None:
    """It compares what ranks do, and counts messages although ranks send different numbers."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as by TORCH_DISTRIBUTED_DEBUG
    try:
        comm = Communicator(dist.new_group(range(world_size)), nodes="aaaabbc"[:world_size])
        o, lse = states_of_ranks(1, world_size, (2, 4, 1, 16))
        for strategy in (*CANONICAL, *CANONICAL):
            expected = merge_states(o, lse)
            assert_same_bits(comm.all_merge_states(o[rank], lse[rank], strategy=strategy), expected)
            with pytest.raises(ExchangeError, match="rank 1"):  # in step, or torch would tell
                comm.agree((("what", rank == 1),))
    finally:
        dist.set_debug_level(before)


@on_ranks(2)
def test_refused_options(rank: int, world_size: int) -> None:
    comm = Communicator()
    o, lse = torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1)
    with pytest.raises(ValueError, match=r"payload_dtype must be torch.float32 or torch.bf"):
        comm.all_merge_states(o, lse, payload_dtype=torch.float16)
    asked = "with payload_dtype torch.bfloat16, head_sharded False, strategy must be one of auto, "
    with pytest.raises(ValueError, match=asked + ".*one_shot, two_phase, got 'three_allreduce'"):
        comm.all_merge_states(o, lse, strategy="three_allreduce", payload_dtype=BF16)
    asked = "with payload_dtype torch.float32, head_sharded True, strategy must be one of auto, "
    with pytest.raises(ValueError, match=asked + "two_phase, got 'all_gather'"):
        comm.all_merge_states(o, lse, strategy="all_gather", head_sharded=True)
    for counts in ([1, 1], [2, -1], [1.0, 1.0], [True, True], "11", 2, []):
        with pytest.raises(ValueError, match="head_counts must be an integer of at least 0 for ea"):
            comm.all_merge_states(o, lse, head_counts=counts, head_sharded=counts != [1, 1])
    for counts in ([2], [1, 0], [1, 1, 0], [2, 2]):
        with pytest.raises(ValueError, match=r"be 2 integers, .* add up to num_heads_q 2, got"):
            comm.all_merge_states(o, lse, head_counts=counts, head_sharded=True)
    assert comm.bytes_sent == 0 and comm.failed is None


@on_ranks(2)
def test_disagreement_on_options(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=20.0)
    o, lse = torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1)
    for field, value in (("payload_dtype", BF16), ("head_sharded", True)):
        with pytest.raises(RuntimeError, match=f"{field} is {value} on rank 1, "):
            comm.all_merge_states(o, lse, **({field: value} if rank == 1 else {}))
    counts = [2 - rank, rank]
    with pytest.raises(
        RuntimeError, match=r"head_sharded is \(1, 1\) on rank 1, \(2, 0\) on rank 0"
    ):
        comm.all_merge_states(o, lse, head_sharded=True, head_counts=counts)
    comm.all_merge_states(o, lse)
