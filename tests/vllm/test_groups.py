# SPDX-License-Identifier: BSD-3-Clause
"""Collectives of vLLM's groups: sums in rank order, shapes along any dimension, deadlines."""

import os
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from distributed import on_ranks
from engine import stub_of_vllm
from faults import AMPLE
from tiers import tiers
from tree_attention import ExchangeError


def group(timeout: float = 60, *, shares_memory: bool = False) -> Any:
    """The communicator of all ranks, as vLLM makes it, for an engine that serves."""
    import vllm.config
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from tree_attention.vllm import groups

    vllm.config.current = SimpleNamespace(
        parallel_config=SimpleNamespace(cpu_distributed_timeout_seconds=timeout, nnodes=1)
    )
    CpuCommunicator.shares_memory = shares_memory
    return groups.GroupCommunicator(dist.group.WORLD, unique_name="tp:0")


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@on_ranks(3)
def test_all_reduce(rank: int, world_size: int, dtype: torch.dtype) -> None:
    with stub_of_vllm():
        comm = group()
        for shape in ((1, 8), (3, 7), (40, 4096), (5,)):
            x = of_rank(rank, shape, dtype)
            all_ranks = [of_rank(r, shape, dtype) for r in range(world_size)]
            if dtype.is_floating_point:
                expected = sum((t.float() for t in all_ranks), torch.zeros(())).to(dtype)
            else:
                expected = torch.stack(all_ranks).sum(0)
            found = comm.all_reduce(x)
            assert found is x and torch.equal(found, expected)


@pytest.mark.parametrize("dim", [0, 1, -1])
@on_ranks(3)
def test_gathers(rank: int, world_size: int, dim: int) -> None:
    with stub_of_vllm():
        comm = group()
        shape = (2, 3, 4)
        whole = torch.cat([of_rank(r, shape, torch.bfloat16) for r in range(world_size)], dim)
        mine = of_rank(rank, shape, torch.bfloat16)
        assert torch.equal(comm.all_gather(mine, dim), whole)
        found = comm.gather(mine, 1, dim)
        assert found is None if rank != 1 else torch.equal(found, whole)


@on_ranks(2)
def test_reduce_scatter(rank: int, world_size: int) -> None:
    with stub_of_vllm():
        comm, shape = group(), (4, 6)
        total = of_rank(0, shape, torch.float32) + of_rank(1, shape, torch.float32)
        x = of_rank(rank, shape, torch.float32)
        part = comm.reduce_scatter(x, -1)
        assert torch.equal(part, total[:, 3 * rank :][:, :3]) and part.is_contiguous()
        with pytest.raises(ValueError, match="size in dim 0 must be a multiple of 2 ranks, got 3"):
            comm.reduce_scatter(x[:3], 0)
        assert torch.equal(x, of_rank(rank, shape, torch.float32))


@on_ranks(2)
def test_groups_that_share_memory_stay_vllms(rank: int, world_size: int) -> None:
    with stub_of_vllm():
        comm, x = group(shares_memory=True), torch.ones(2)
        for name in ("all_reduce", "all_gather", "gather", "reduce_scatter"):
            assert getattr(comm, name)(x) == "vLLM's"


@on_ranks(2)
def test_graphs_are_kept_by_what_they_call(rank: int, world_size: int) -> None:
    """A graph of one host has vLLM's shared memory in it, one of several the communicators."""
    with stub_of_vllm():
        from vllm import envs

        import tree_attention.vllm

        with patch.dict(os.environ, {"TREE_ATTENTION_VLLM": "1"}):
            tree_attention.vllm.register()
        factor = envs.environment_variables["TREE_ATTENTION_VLLM"]
        group(shares_memory=True)
        assert factor() == ""
        comm = group()
        assert factor() == f"tp:0: {comm._sums.name}, {comm._gathers.name}"


@pytest.mark.parametrize("name", tiers(["all_reduce"], ["all_gather", "gather", "reduce_scatter"]))
@on_ranks(2, lost=[1])
def test_a_lost_rank_is_an_error_in_time(rank: int, world_size: int, name: str) -> None:
    with stub_of_vllm():
        comm = group(timeout=3)
        from tree_attention.vllm import groups

        getattr(comm, name)(torch.ones(2))
        groups.step_runs()
        groups.step_begins()
        if rank == 1:
            os._exit(1)
        begin = time.monotonic()
        with pytest.raises(ExchangeError, match="rank 0 of 2"):
            getattr(comm, name)(torch.ones(2))
        assert time.monotonic() - begin < AMPLE


@pytest.mark.deep
@on_ranks(2, fresh=True)
def test_hosts_may_compile_before_they_meet(rank: int, world_size: int) -> None:
    """Until the second step of requests, an exchange waits for longer than the timeout."""
    with stub_of_vllm():
        comm = group(timeout=1)
        from tree_attention.vllm import groups

        if rank == 1:
            time.sleep(2)
        x = torch.ones(2)
        assert comm.all_reduce(x).eq(2).all()
        for _ in range(2):  # one for each group of caches
            groups.step_begins()
        if rank == 1:  # the first step, which may still compile
            time.sleep(2)
        groups.step_runs()
        assert comm.all_reduce(torch.ones(2)).eq(2).all()
        groups.step_begins()
        if rank == 1:
            time.sleep(2)
        with pytest.raises(ExchangeError):
            comm.all_reduce(x)
