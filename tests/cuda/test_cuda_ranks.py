# SPDX-License-Identifier: BSD-3-Clause
"""Several ranks on one GPU: Gloo, whose messages pass through host memory, and NCCL."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run_ranks
from helpers import Problem, assert_same_bits, make_problem, paginate
from sharded import CASES, make_case, merged
from tree_attention import BlockCyclic, ring_decode, strategies, tree_decode
from tree_attention.exchange import Communicator, Link, get_communicator
from tree_attention.exchange.transport import buffers, process_group

State = tuple[Tensor, Tensor]
CUDA = torch.device("cuda")
ON_CUDA = [name for name, case in CASES.items() if case.get("layout") != "unaligned"]


def nccl_version() -> tuple[int, ...]:
    return torch.cuda.nccl.version() if dist.is_nccl_available() else ()


# Known before a test begins: with an older release, as torch 2.11 has it, there is no such test.
needs_nccl_of_ranks_on_one_gpu = pytest.mark.skipif(
    nccl_version() < (2, 30, 3),
    reason=f"NCCL {nccl_version()} takes one rank for each GPU, or is not there",
)


def on_host(state: State) -> State:
    """For the process that compares the ranks."""
    assert all(x.is_cuda for x in state)
    return tuple(x.cpu() for x in state)


def assert_ranks_agree(results: list[State]) -> None:
    for result in results[1:]:
        assert_same_bits(result, results[0])


def decode_case(
    rank: int, world_size: int, case: str, layout: str, strategy: str, backend: str = "gloo"
) -> State:
    problem, shards = make_case(case, layout, world_size)
    on_device = [shard.to(CUDA) for shard in shards]
    own = on_device[rank]
    arguments = own.q, own.k, own.v, own.key_ranges
    group = group_of(backend)
    result = tree_decode(*arguments, group=group, strategy=strategy, **own.options)
    problem.check(*result)
    if strategy == "auto":
        assert_same_bits(result, merged(on_device, own.q.dtype))
        assert_same_bits(ring_decode(*arguments, group=group, **own.options), result)
    for _ in range(3):
        again = tree_decode(*arguments, group=group, strategy=strategy, **own.options)
        assert_same_bits(again, result)
    return on_host(result)


_groups: dict[str, dist.ProcessGroup] = {}


def group_of(backend: str) -> dist.ProcessGroup:
    if backend == "gloo":
        return dist.group.WORLD
    if backend not in _groups:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


@pytest.mark.parametrize(
    "layout, world_size", [("cyclic", 3), *(("uneven", size) for size in (1, 2, 3, 5, 8))]
)
@pytest.mark.parametrize("case", ON_CUDA)
def test_gloo(case: str, layout: str, world_size: int, cuda: torch.device) -> None:
    assert_ranks_agree(run_ranks(decode_case, world_size, case, layout, "auto"))


@pytest.mark.parametrize("strategy", strategies())
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", ["one query", "rows without keys", "bf16 mqa"])
def test_gloo_strategies(case: str, world_size: int, strategy: str, cuda: torch.device) -> None:
    assert_ranks_agree(run_ranks(decode_case, world_size, case, "uneven", strategy))


def decode_pages(rank: int, world_size: int) -> State:
    torch.manual_seed(2)
    problem = make_problem(seqlen_q=2, seqlen_k=100, ranges="causal", dtype=torch.bfloat16)
    own = problem.shard(BlockCyclic(world_size, 8), rank)
    k, v, table = paginate(own.k, own.v, 16, per_head=rank % 2 == 0)
    own = Problem(own.q, k, v, own.key_ranges, {"page_table": table}).to(CUDA)
    arguments = own.q, own.k, own.v, own.key_ranges
    result = tree_decode(*arguments, **own.options)
    problem.check(*result)
    assert_same_bits(ring_decode(*arguments, **own.options), result)
    return on_host(result)


def test_pages(cuda: torch.device) -> None:
    assert_ranks_agree(run_ranks(decode_pages, 3))


def stage(rank: int, world_size: int) -> None:
    """Messages go through page-locked memory that stays, and the counters are those of the CPU."""
    torch.manual_seed(3)
    problem = make_problem(seqlen_k=500).shard(BlockCyclic(world_size, 16), rank)
    on_cpu, on_cuda = Communicator(), Communicator()
    tree_decode(problem.q, problem.k, problem.v, group=on_cpu)
    own = problem.to(CUDA)
    made: list[Tensor] = []

    def host_memory(num_bytes: int) -> Tensor:
        made.append(buffers.host_memory(num_bytes))
        return made[-1]

    with mock.patch.object(process_group, "host_memory", host_memory):
        tree_decode(own.q, own.k, own.v, group=on_cuda)
        assert on_cuda.bytes_sent == on_cpu.bytes_sent > 0
        link = on_cuda.link
        assert link.is_staged(own.q.device) and link.transport_device(own.q.device).type == "cpu"
        assert made and all(x.is_pinned() for x in made)
        count = len(made)
        for _ in range(20):
            tree_decode(own.q, own.k, own.v, group=on_cuda)
    assert len(made) == count


def test_staging_through_page_locked_memory(cuda: torch.device) -> None:
    run_ranks(stage, 2)


def lose_a_rank(rank: int, world_size: int) -> str:
    torch.manual_seed(4)
    own = make_problem(seqlen_k=100).shard(BlockCyclic(world_size, 16), rank).to(CUDA)
    comm = get_communicator()
    comm.timeout = 5.0
    tree_decode(own.q, own.k, own.v, group=comm)
    if rank == 1:
        os._exit(1)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {rank} of {world_size}"):
        for _ in range(2):  # the state of the lost rank's last call may still arrive
            tree_decode(own.q, own.k, own.v, group=comm)
    assert time.monotonic() - begin < 10.0
    return str(comm.failed)


def test_a_lost_rank_is_an_error_in_time(cuda: torch.device) -> None:
    results = run_ranks(lose_a_rank, 3, lost=[1])
    assert all(isinstance(results[rank], str) for rank in (0, 2))


@pytest.fixture
def nccl(cuda: torch.device) -> None:
    if not nccl_version():
        pytest.skip("torch was built without NCCL")


def move_alone(rank: int, world_size: int) -> None:
    """What a strategy may ask of a link, with NCCL and one rank: nothing travels."""
    link = Link(group_of("nccl"))
    assert not link.is_staged(torch.device("cuda", 0))
    deadline = time.monotonic() + 60.0
    x = torch.randn(1000, device=CUDA)
    expected, received = x.clone(), torch.full_like(x, torch.nan)
    link.all_gather(received, x, deadline)
    link.all_reduce(x, dist.ReduceOp.SUM, deadline)
    link.broadcast(x, deadline)
    assert torch.equal(received, expected) and torch.equal(x, expected)
    assert link.bytes_sent == 0
    torch.manual_seed(5)
    problem = make_problem(dtype=torch.bfloat16)
    own = problem.to(CUDA)
    for decode in (tree_decode, ring_decode):
        problem.check(*decode(own.q, own.k, own.v, group=group_of("nccl")))


@pytest.mark.gpu("NCCL")
def test_nccl_with_one_rank(nccl: None) -> None:
    run_ranks(move_alone, 1)


@pytest.mark.gpu("NCCL")
@needs_nccl_of_ranks_on_one_gpu
@pytest.mark.parametrize("strategy", ["auto", *strategies()])
@pytest.mark.parametrize("world_size", [2, 4])
def test_nccl_with_ranks_on_one_gpu(world_size: int, strategy: str, nccl: None) -> None:
    for case in ("one query", "rows without keys", "bf16 mqa"):
        assert_ranks_agree(run_ranks(decode_case, world_size, case, "uneven", strategy, "nccl"))


def broadcast_host_memory(rank: int, world_size: int) -> None:
    """Random states are tensors of the CPU, and NCCL has none."""
    link = Link(group_of("nccl"))
    state = torch.arange(100, dtype=torch.uint8) if rank == 0 else torch.zeros(100).byte()
    link.broadcast(state, time.monotonic() + 60.0)
    assert torch.equal(state, torch.arange(100, dtype=torch.uint8))


@pytest.mark.gpu("NCCL")
def test_nccl_moves_host_memory_through_the_device(nccl: None) -> None:
    run_ranks(broadcast_host_memory, 1)
