# SPDX-License-Identifier: BSD-3-Clause
"""The exchange itself: one collective, canonical bits, buffers that stay, honest counters."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import on_ranks, run_ranks
from helpers import assert_same_bits, assert_same_non_finite
from tiers import by_world
from tree_attention import (
    all_merge_states,
    merge_states,
    reference,
    ring_decode,
    ring_pass_q_decode,
    strategies,
    tree_decode,
)
from tree_attention.exchange import (
    DEFAULT_TIMEOUT,
    Communicator,
    get_communicator,
)
from tree_attention.exchange.strategies import STRATEGIES
from tree_attention.exchange.transport import buffers as exchange_state
from tree_attention.exchange.transport.buffers import CALL_ID_BYTES, StateBuffers

NAN, INF = torch.nan, torch.inf
State = tuple[Tensor, Tensor]


def random_states(seed: int, world_size: int, *, head_dim: int = 24) -> State:
    """States of all ranks, some empty with uninitialised o, one row empty on every rank."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, queries = torch.randint(1, 4, (3,), generator=generator).tolist()
    shape = (world_size, batch, heads, queries)
    o = torch.randn(*shape, head_dim, generator=generator)
    lse = torch.randn(shape, generator=generator) * 10 ** (seed % 4)
    empty = torch.rand(shape, generator=generator) < 0.3
    empty[:, 0, 0, 0] = True
    o[empty], lse[empty] = NAN, -INF
    return o, lse


def exchange_states(rank: int, world_size: int, strategy: str, seeds: range) -> list[State]:
    comm = get_communicator()
    results = []
    for seed in seeds:
        o_parts, lse_parts = random_states(seed, world_size)
        result = comm.all_merge_states(o_parts[rank], lse_parts[rank], strategy=strategy)
        true_o, true_lse = reference.merge_states(o_parts, lse_parts)
        for name, actual, truth in zip(("o", "lse"), result, (true_o, true_lse), strict=True):
            assert_same_non_finite(name, actual, truth)
            error = (actual.double() - truth)[truth.isfinite()].abs()
            assert (error <= 1e-6 * truth[truth.isfinite()].abs().clamp(min=1)).all(), error.max()
        assert result[1][0, 0, 0] == -INF and not result[0][0, 0, 0].any()
        if STRATEGIES[strategy].is_canonical:
            assert_same_bits(result, merge_states(o_parts, lse_parts))
        results.append(result)
    return results


@by_world([1, 3], [2, 4, 5, 6, 7])
@pytest.mark.parametrize("strategy", strategies())
def test_merges_states(strategy: str, world_size: int) -> None:
    first, *others = run_ranks(exchange_states, world_size, strategy, range(20))
    for results in others:
        for result, expected in zip(results, first, strict=True):
            assert_same_bits(result, expected)


@pytest.mark.parametrize("strategy", strategies())
@on_ranks(3)
def test_nan_stays_in_its_row(rank: int, world_size: int, strategy: str) -> None:
    """NaN reaches the rows it belongs to, on every rank, and no others."""
    o, lse = torch.ones(1, 4, 1, 8), torch.zeros(1, 4, 1)
    if rank == 1:
        o[0, 0], lse[0, 1], lse[0, 2] = NAN, NAN, -INF
    o, lse = get_communicator().all_merge_states(o, lse, strategy=strategy)
    assert o[0, :2].isnan().all() and lse[0, 1].isnan().all()
    expected = torch.tensor([float(world_size), world_size - 1, world_size]).log()[:, None]
    assert (o[0, 2:] - 1).abs().max() < 1e-6
    assert (lse[0, [0, 2, 3]] - expected).abs().max() < 1e-6
    # A poisoned query, key or value of one rank, by strategies and rings.
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 2, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    for decode in (partial(tree_decode, strategy=strategy), ring_decode, ring_pass_q_decode):
        o, lse = decode(q, k, v)
        bad_k, bad_v = k.clone(), v.clone()
        if rank == 1:
            bad_k[0, 1, 2], bad_v[2, 0, 4, 3] = NAN, NAN
        poisoned_o, poisoned_lse = decode(q, bad_k, bad_v)
        bad_o, bad_lse = torch.zeros_like(o).bool(), torch.zeros_like(lse).bool()
        bad_o[0, 2:], bad_lse[0, 2:], bad_o[2, :2, :, 3] = True, True, True
        assert torch.equal(poisoned_o.isnan(), bad_o) and torch.equal(poisoned_lse.isnan(), bad_lse)
        assert torch.equal(poisoned_o[~bad_o], o[~bad_o])
        assert torch.equal(poisoned_lse[~bad_lse], lse[~bad_lse])


def count_collectives(rank: int, world_size: int, strategy: str) -> int:
    group = dist.group.WORLD
    comm = Communicator()
    o, lse = random_states(0, world_size)
    comm.all_merge_states(o[rank], lse[rank], strategy=strategy)  # delivery is tested
    before = group._get_sequence_number_for_group()
    comm.all_merge_states(o[rank], lse[rank], strategy=strategy)
    return group._get_sequence_number_for_group() - before


def test_number_of_collectives() -> None:
    # Two messages sent and two received: a Gloo all-gather is no collective of the library.
    assert run_ranks(count_collectives, 3, "all_gather", direct=False) == [4] * 3
    assert run_ranks(count_collectives, 3, "three_allreduce") == [3] * 3


@on_ranks(2)
def test_results_are_not_in_the_buffers_of_the_next_exchange(rank: int, world_size: int) -> None:
    comm = Communicator()
    o, lse = torch.full((2, 3, 1, 16), float(rank)), torch.zeros(2, 3, 1)
    parts = torch.stack([torch.zeros_like(o), torch.ones_like(o)])
    expected = merge_states(parts, torch.zeros(2, 2, 3, 1))
    result = comm.all_merge_states(o, lse)
    comm.all_merge_states(o.fill_(7.0), lse.fill_(1.0))
    assert_same_bits(result, expected)


@on_ranks(2)
def test_views_of_any_strides(rank: int, world_size: int) -> None:
    comm = Communicator()
    generator = torch.Generator().manual_seed(0)
    o_parts = torch.randn(world_size, 2, 4, 4, 8, generator=generator)
    lse_parts = torch.randn(world_size, 2, 4, 4, generator=generator)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(1, 2),
        lambda x: x[:, :2],
        lambda x: x[1:],
        lambda x: x,
    ]
    for view, payload_dtype in itertools.product(views, (torch.float32, torch.bfloat16)):
        o, lse = view(o_parts[rank]), view(lse_parts[rank])
        merged = comm.all_merge_states(o, lse, payload_dtype=payload_dtype)
        parts = torch.stack([view(x) for x in o_parts.to(payload_dtype).float()])
        expected = merge_states(parts, torch.stack([view(x) for x in lse_parts]))
        assert_same_bits(merged, expected)


@on_ranks(3)
def test_output_dtype(rank: int, world_size: int) -> None:
    o_parts, lse_parts = random_states(1, world_size)
    comm = get_communicator()
    o, lse = comm.all_merge_states(o_parts[rank], lse_parts[rank], out_dtype=torch.bfloat16)
    assert_same_bits((o, lse), merge_states(o_parts, lse_parts, out_dtype=torch.bfloat16))
    half = o_parts.half()  # another rank's kernel may have rounded already
    o, _ = comm.all_merge_states(half[rank], lse_parts[rank])
    assert_same_bits((o,), merge_states(half, lse_parts)[:1])


@on_ranks(2)
def test_inference_mode(rank: int, world_size: int) -> None:
    """Buffers made in inference mode must serve outside of it, and the other way round."""
    comm = Communicator()
    comm.link.is_staged = lambda device: True  # type: ignore[method-assign]
    o_parts, lse_parts = random_states(2, world_size)
    expected = merge_states(o_parts, lse_parts)
    x = torch.full((30_000,), float(rank))
    with torch.inference_mode():
        assert_same_bits(comm.all_merge_states(o_parts[rank], lse_parts[rank]), expected)
        assert (comm.all_reduce(x) == 1).all()
    assert_same_bits(comm.all_merge_states(o_parts[rank], lse_parts[rank]), expected)
    assert (comm.all_reduce(x) == 1).all()


@on_ranks(2)
def test_nccl_moves_tensors_of_the_host_through_the_device(rank: int, world_size: int) -> None:
    link = Communicator().link
    link._backends = {"cuda": "nccl"}
    gpu = torch.device("cuda", 3)
    with mock.patch.object(torch.cuda, "current_device", return_value=3):
        assert link.transport_device(torch.device("cpu")) == link.transport_device(gpu) == gpu
        assert not link.is_staged(gpu)


@on_ranks(2)
def test_staging_through_host_memory(rank: int, world_size: int) -> None:
    """Gloo with tensors of a device, played by the CPU."""
    comm, direct = Communicator(), Communicator()
    comm.link.is_staged = lambda device: True  # type: ignore[method-assign]
    for strategy in strategies():
        for seed in range(3):
            o_parts, lse_parts = random_states(seed, world_size)
            state = o_parts[rank], lse_parts[rank]
            expected = direct.all_merge_states(*state, strategy=strategy)
            assert_same_bits(comm.all_merge_states(*state, strategy=strategy), expected)
    assert comm.bytes_sent == direct.bytes_sent
    assert comm.link.transport_device(torch.device("cuda", 0)) == torch.device("cpu")


@on_ranks(2)
def test_refused_arguments(rank: int, world_size: int) -> None:
    comm = Communicator()
    o, lse = torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1)
    for strategy in ("butterfly-ish", ["all_gather"], None):
        with pytest.raises(ValueError, match="strategy must be one of auto, all_gather, butter"):
            comm.all_merge_states(o, lse, strategy=strategy)  # type: ignore[arg-type]
    for bad in ((o[0], lse[0]), (o, lse[..., None]), (o, lse.double()), (o, lse[:, :1])):
        with pytest.raises(ValueError, match=r"all_merge_states: o must be .* and lse float32"):
            comm.all_merge_states(*bad)
    with pytest.raises(
        RuntimeError, match="all_merge_states: o and lse must not require a gradient"
    ):
        comm.all_merge_states(o.clone().requires_grad_(), lse)
    with pytest.raises(ValueError, match=r"head_dim must be at least 1, got .* \[1, 2, 1, 0\]"):
        comm.all_merge_states(o[..., :0], lse)
    for bad_dtype in (torch.float64, torch.int32):
        with pytest.raises(ValueError, match=f"o must be float32, .* got {bad_dtype}"):
            comm.all_merge_states(o.to(bad_dtype), lse)
        with pytest.raises(ValueError, match=f"out_dtype must be float32, .* got {bad_dtype}"):
            comm.all_merge_states(o, lse, out_dtype=bad_dtype)
    with pytest.raises(ValueError, match="o and lse must be on one device, got cpu and meta"):
        comm.all_merge_states(o, lse.to("meta"))
    assert comm.bytes_sent == 0 and comm.failed is None
    with pytest.raises(ValueError, match="group must be a process group that this process is in"):
        Communicator("world")  # type: ignore[arg-type]
    assert_same_bits(comm.all_merge_states(o, lse), (o, lse + math.log(2)))  # still usable


def test_strategies() -> None:
    assert strategies() == (
        "all_gather", "butterfly", "hierarchical", "three_allreduce", "two_phase",
    )  # fmt: skip
    canonical = [name for name in strategies() if STRATEGIES[name].is_canonical]
    assert canonical == ["all_gather", "butterfly", "hierarchical", "two_phase"]


@on_ranks(2)
def test_communicators_live_as_long_as_their_group(rank: int, world_size: int) -> None:
    world = get_communicator()
    assert get_communicator() is world and get_communicator(dist.group.WORLD) is world
    assert get_communicator(world) is world and world.timeout == DEFAULT_TIMEOUT
    group = dist.new_group([0, 1])
    comm = get_communicator(group)
    assert comm is not world and comm is get_communicator(group)
    o, lse = torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1)
    comm.all_merge_states(o, lse)
    alive = weakref.ref(group), weakref.ref(comm)
    dist.destroy_process_group(group)
    del group, comm
    gc.collect()
    assert alive[0]() is None and alive[1]() is None


def test_without_process_group() -> None:
    comm = get_communicator()
    assert (comm.rank, comm.world_size) == (0, 1)
    o, lse = torch.full((1, 2, 1, 8), 1.0), torch.full((1, 2, 1), 2.0)
    merged = comm.all_merge_states(o, lse, out_dtype=torch.bfloat16)
    assert merged[0].dtype == torch.bfloat16 and (merged[0] == 1).all() and (merged[1] == 2).all()
    comm.agree((("anything", 1),))
    assert comm.bytes_sent == 0 and comm.seconds == 0
    x = torch.randn(3).bfloat16()
    assert torch.equal(comm.all_reduce(x, payload_dtype=torch.bfloat16), x)
    o, lse = all_merge_states(torch.ones(1, 2, 1, 8), torch.full((1, 2, 1), 2.0))
    assert (o == 1).all() and (lse == 2).all()


@pytest.mark.parametrize("holder", [torch.device("meta"), torch.device("cpu")], ids=str)
def test_memory_that_states_outgrew(holder: torch.device) -> None:
    """A captured graph holds addresses: a device keeps memory that states outgrew."""
    buffers = StateBuffers()

    def get(size: int, dtype: torch.dtype = torch.float32) -> exchange_state.State:
        return buffers.get(torch.Size((size, 4, 1, 8)), dtype, holder)

    first = get(1)
    assert get(1) is first and get(1, torch.bfloat16) is not first
    block = first.send._base
    assert get(1, torch.bfloat16).send._base is block
    for size in range(2, 100):
        messages, o_parts, lse_parts = get(size).parts(3)
        state = get(size)  # another one where its parts have grown
        assert 3 * state.send.nbytes == messages.nbytes == 3 * (size * 4 * 9 * 4 + CALL_ID_BYTES)
        assert o_parts.shape == (3, size, 4, 1, 8) and lse_parts.shape == (3, size, 4, 1)
        assert get(size) is state
    assert get(1) is not first and get(1).send._base is not block
    kept = buffers.prepared.arena._outgrown
    assert len(kept) < 20
    assert any(block is other for other in kept) == (holder.type != "cpu")
