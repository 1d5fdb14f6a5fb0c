# SPDX-License-Identifier: BSD-3-Clause
"""Concatenations over ranks: of uneven parts, of any dtype and strides, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import COMPILING, Lost, on_ranks, run_ranks
from faults import AMPLE, QUICK, SLACK, TIMEOUT, Outcome, end_or_stall, failure
from tiers import by_world, tiers
from tree_attention import Communicator, ExchangeError

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)
# The counts of ranks 0, 1, ...; a world takes as many as it has ranks.
COUNTS = ((3, 3, 3, 3), (1, 4, 0, 2), (0, 5, 1, 0), (0, 0, 0, 0), (1, 1, 1, 200_000))


def parts_of(counts: Sequence[int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    shape: list[Any] = [2, 3, 1]
    shape[dim] = sum(counts)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if dtype.is_complex:
        values = torch.complex(values, -values)
    return list((values * 100).to(dtype).split(list(counts), dim))


@by_world([3], [1, 2, 4])
@on_ranks()
def test_parts_of_any_size_dtype_and_strides(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    for counts in (counts[:world_size] for counts in COUNTS):
        for dim in (0, 1, -1):
            for dtype in DTYPES:
                parts = parts_of(counts, dim, dtype)
                expected = torch.cat(parts, dim)
                for x in (parts[rank], parts[rank].mT.contiguous().mT, parts[rank].conj()):
                    found = comm.all_gather(x, counts, dim)
                    assert found.is_contiguous()
                    assert found.numel() == 0 or found.data_ptr() != x.data_ptr()
                    whole = expected.conj().resolve_conj() if x.is_conj() else expected
                    assert found.dtype == dtype and torch.equal(found, whole)
    with torch.inference_mode():  # buffers made in it, and after it
        whole = torch.arange(7.0 * world_size).view(world_size, 7)
        assert torch.equal(comm.all_gather(whole[rank, None], [1] * world_size, 0), whole)
    assert torch.equal(comm.all_gather(whole[rank, None], [1] * world_size, 0), whole)


@on_ranks(3)
def test_bytes_and_operations(rank: int, world_size: int) -> None:
    """Exactly the part's, to every other rank, in one round."""
    comm = Communicator(timeout=AMPLE)
    for counts in ((2, 2, 2), (0, 7, 1), (100_000, 1, 1)):
        x = torch.ones(5, counts[rank], dtype=torch.int16)
        for _ in range(2):
            before = comm.bytes_sent, comm.link.num_operations
            comm.all_gather(x, counts)
        assert comm.bytes_sent - before[0] == (world_size - 1) * x.nbytes
        assert comm.link.num_operations - before[1] == 1


def wrong_arguments(x: Tensor, rank: int, world_size: int) -> list[tuple[tuple[Any, ...], str]]:
    """Arguments that are wrong for an `x [2, 3]`, and what is said of them."""
    right = [3] * world_size
    dim = "dim must be an integer from -2 to 1, got"
    integers = f"counts must be {world_size} integers of at least 0, one for each rank, got"
    own = rf"counts\[{rank}\] must be the size of rank {rank}'s x in dim 1, which is 3, got"
    return [
        ((x, right[1:]), rf"{integers} \["),
        ((x, [-1] * world_size), rf"{integers} \[-1"),
        ((x, [3.0] * world_size), rf"{integers} \[3.0"),
        ((x, [True] * world_size), rf"{integers} \[True"),
        ((x, 3), f"{integers} 3"),
        ((x, [4] * world_size), f"{own} 4"),
        ((x, right, 2), f"{dim} 2"),
        ((x, right, -3), f"{dim} -3"),
        ((x, right, 1.0), f"{dim} 1.0"),
        ((x[0, 0], right), "x must have at least one dimension, got a scalar"),
        ((x.to("meta"), right), "x must be on a device that holds values, got meta"),
        (
            (x.to_sparse(), right),
            "x must be a dense tensor, got one of layout torch.sparse_coo",
        ),
    ]


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_refused_arguments(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    x, right = torch.ones(2, 3), [3] * world_size
    for arguments, message in wrong_arguments(x, rank, world_size):
        with pytest.raises((TypeError, ValueError), match=f"^all_gather: {message}"):
            comm.all_gather(*arguments)
    with pytest.raises(RuntimeError, match="all_gather: x must not require a gradient"):
        comm.all_gather(x.clone().requires_grad_(), right)
    with pytest.raises(TypeError, match=r"^all_gather: x must be a tensor, got \[1\]"):
        comm.all_gather([1], right)  # type: ignore[arg-type]
    assert comm.bytes_sent == 0 and comm.failed is None
    assert torch.equal(comm.all_gather(x, right), torch.ones(2, 3 * world_size))


@on_ranks(2)
def test_disagreement_names_rank_and_field(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    last = rank == 1  # of world 2
    for x, counts, dim, message in (
        (torch.ones(2 + last, 3), [3, 3], 1, r"shape without dim is \(3,\) on rank 1, \(2,\)"),
        (torch.ones(3, 3), [3, 3], rank, "dim is 1 on rank 1, 0 on rank 0"),
        (torch.ones(3 + last), [3, 3 + last], 0, r"counts is \(3, 4\) on rank 1, \(3, 3\) on"),
        (torch.ones(3, dtype=DTYPES[rank]), [3, 3], 0, "dtype is torch.float32 on rank 1"),
    ):
        with pytest.raises(ExchangeError, match=message):
            comm.all_gather(x, counts, dim)
    assert comm.bytes_sent == 0 and comm.failed is None
    assert torch.equal(comm.all_gather(torch.ones(3), [3, 3]), torch.ones(6))


def refuse_alone(rank: int, world_size: int) -> Outcome:
    """Rank 0's argument is wrong, of which the others cannot know."""
    comm = Communicator(timeout=TIMEOUT)
    x, counts = torch.ones(3), [3] * world_size
    comm.all_gather(x, counts, timeout=AMPLE)
    if rank == 0:
        with pytest.raises(ValueError, match="dim must be"):
            comm.all_gather(x, counts, 1)
    return failure(comm.all_gather, x, counts)


@by_world([2], [3])
def test_refused_on_one_rank_alone(world_size: int) -> None:
    for seconds, _ in run_ranks(refuse_alone, world_size, fresh=True):
        assert seconds < TIMEOUT + SLACK


def lose_rank(rank: int, world_size: int, victim: int, how: str, size: int) -> Outcome:
    comm = Communicator(timeout=TIMEOUT)
    x, counts = torch.ones(size + rank), [size + r for r in range(world_size)]
    comm.all_gather(x, counts, timeout=AMPLE)
    if rank == victim:
        end_or_stall(how)
    outcome = failure(comm.all_gather, x, counts)
    assert comm.failed is not None
    assert failure(comm.all_gather, x, counts, timeout=AMPLE)[0] < QUICK
    return outcome


@pytest.mark.parametrize("how,size", tiers([("kill", 10), ("stop", 10)], [("kill", 1_000_000)]))
@pytest.mark.parametrize("world_size,victim", tiers([(3, 2)], [(2, 0), (4, 1)]))
def test_lost_ranks(world_size: int, victim: int, how: str, size: int) -> None:
    results = run_ranks(lose_rank, world_size, victim, how, size, lost=[victim])
    for seconds, message in (result for result in results if not isinstance(result, Lost)):
        assert seconds < TIMEOUT + SLACK
        assert "message" in message, message


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks(timeout=COMPILING)
def test_in_a_graph(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=COMPILING)
    counts = [2, 0, 3, 1][:world_size]

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = comm.all_gather(x.int(), counts, 0)
        return rows, comm.all_gather(
            rows.mT * 0.5 + x.sum(), [len(rows)] * world_size, timeout=COMPILING
        )

    x = torch.arange(counts[rank] * 4.0).view(-1, 4)
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for found, expected in zip(compiled(x), twice(x), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected)
