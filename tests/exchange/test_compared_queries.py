# SPDX-License-Identifier: BSD-3-Clause
"""Queries that differ on one rank: all of their values are compared, each with its own row."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from faults import AMPLE, QUICK, SLACK, TIMEOUT, assert_refuses_further_use, end_or_stall, failure
from pairwise import each_pair, each_value
from tiers import tiers, tiers_of
from tree_attention import lean_decode, ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.exchange import Communicator, Link
from tree_attention.exchange.agreement import queries

ROUNDING = "the queries of the ranks differ by rounding"
DECODERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "tree": tree_decode,
    "ring": ring_decode,
    "ring of queries": ring_pass_q_decode,
}
# A rounding of each dtype that is within the bound of its rows, and never nothing.
ROUNDED = {torch.float32: 1 + 5e-4, torch.bfloat16: 1 + 2e-2, torch.float16: 1 + 5e-3}


def prompt(shape: tuple[int, ...], dtype: torch.dtype, *, strided: bool = True) -> Tensor:
    """The same on every rank; strided as models make it: `[batch, seqlen_q, heads, head_dim]`."""
    batch, num_heads, seqlen_q, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, seqlen_q, num_heads, head_dim, generator=generator).to(dtype)
    return q.transpose(1, 2) if strided else q.transpose(1, 2).contiguous()


def decode(kind: str, comm: Communicator, q: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(comm.rank)
    k = torch.randn(q.shape[0], 1, 5, q.shape[3], generator=generator).to(q.dtype)
    return DECODERS[kind](q, k, k, group=comm)


def whole(q: Tensor, world_size: int) -> Tensor:
    keys = [
        torch.randn(q.shape[0], 1, 5, q.shape[3], generator=torch.Generator().manual_seed(rank)).to(
            q.dtype
        )
        for rank in range(world_size)
    ]
    return lean_decode(q, torch.cat(keys, 2), torch.cat(keys, 2))[0]


def assert_compares(kind: str, comm: Communicator, q: Tensor) -> None:
    """The communicator goes on, and compares: no rounding was found in what was different."""
    assert comm.failed is None
    for _ in range(2):
        o, _ = decode(kind, comm, q)
        torch.testing.assert_close(o, whole(q, comm.world_size), atol=2e-2, rtol=2e-2)
    changed = q.clone()
    changed[-1, -1, -1, -1] += 4.0 * comm.rank
    _, message = failure(decode, kind, comm, changed)
    assert "are not those of rank 0" in message


PROMPTS = [
    *product(
        (2, 3),
        (torch.bfloat16, torch.float32, torch.float16),
        DECODERS,
        ((1, 8, 40, 64), (1, 8, 600, 64), (1, 32, 512, 128)),
    )
]
FIRST = each_value(x for x in PROMPTS if x[:2] == (2, torch.bfloat16))


@pytest.mark.parametrize(
    "world_size, dtype, kind, shape", tiers(FIRST[:2], [*FIRST[2:], *each_pair(PROMPTS, FIRST)])
)
def test_one_other_token_in_a_prompt(
    world_size: int, dtype: torch.dtype, kind: str, shape: tuple[int, ...]
) -> None:
    run_ranks(other_tokens, world_size, kind, dtype, shape)


def other_tokens(
    rank: int, world_size: int, kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    comm = Communicator(timeout=AMPLE)
    rng = random.Random(str(shape))
    q = prompt(shape, dtype)
    decode(kind, comm, q)
    for odd in range(world_size):
        token = rng.randrange(shape[2])
        changed = q.clone(memory_format=torch.preserve_format)
        if rank == odd:
            changed[:, :, token] = q[:, :, token - 1] + 1.0
        seconds, message = failure(decode, kind, comm, changed)
        others = [r for r in range(1, world_size) if odd in (0, r)]
        named = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        assert seconds < QUICK
        assert f"the queries of {named} are not those of rank 0" in message
        assert re.search(rf"those of token {token}, head \d+, sequence 0 differ by [1-9]", message)
    assert_compares(kind, comm, q)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("dtype", ROUNDED)
@on_ranks(2)
def test_rounding_alone_is_accepted_with_a_warning(
    rank: int, world_size: int, dtype: torch.dtype, kind: str
) -> None:
    comm = Communicator(timeout=AMPLE)
    q = prompt((1, 8, 300, 64), dtype)
    decode(kind, comm, q)
    rounded = q * ROUNDED[dtype] if rank else q
    sent = comm.bytes_sent
    decode(kind, comm, q)
    sent = comm.bytes_sent - sent
    before = comm.bytes_sent
    with pytest.warns(RuntimeWarning, match=ROUNDING):
        o, _ = decode(kind, comm, rounded)
    torch.testing.assert_close(o, whole(q, 2), atol=5e-2, rtol=5e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(decode(kind, comm, rounded)[0], o)
    if kind == "tree":  # the queries that rank 0 tells the others are not counted
        assert comm.bytes_sent - before == 3 * sent


@pytest.mark.parametrize("kind", tiers_of(DECODERS, quick=["tree"]))
@on_ranks(3)
def test_one_other_token_among_rounding_is_an_error(rank: int, world_size: int, kind: str) -> None:
    comm = Communicator(timeout=AMPLE)
    q = prompt((2, 8, 300, 64), torch.bfloat16)
    changed = q * ROUNDED[q.dtype] if rank else q.clone()
    if rank == 2:
        changed[1, 3, 17] = -q[1, 3, 17]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _, message = failure(decode, kind, comm, changed)
            assert "the queries of rank 2 are not those of rank 0" in message
            assert "those of token 17, head 3, sequence 1 differ by" in message
    assert_compares(kind, comm, q)


@on_ranks(2)
def test_a_small_row_is_not_judged_by_a_large_one(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    q = prompt((1, 4, 50, 64), torch.float32, strided=False)
    q[0, 0, 0] = 1e6
    changed = q.clone()
    changed[0, 2, 30] += 0.5 * rank
    _, message = failure(decode, "tree", comm, changed)
    assert "those of token 30, head 2, sequence 0 differ by 0.5," in message
    assert_compares("tree", comm, q)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@on_ranks(2)
def test_rows_without_numbers(rank: int, world_size: int, value: float) -> None:
    """Equal ones are equal, and one rank's alone are far from any number."""
    comm = Communicator(timeout=AMPLE)
    q = prompt((1, 4, 50, 64), torch.float32)
    q[0, 1, 7] = value
    decode("tree", comm, q)
    rounded = q * ROUNDED[q.dtype] if rank else q
    alone = rounded.clone()
    alone[0, 3, 9, 5] = value if rank else 1.0
    _, message = failure(decode, "tree", comm, alone)
    assert "those of token 9, head 3, sequence 0 differ by inf" in message
    with pytest.warns(RuntimeWarning, match=ROUNDING):
        decode("tree", comm, rounded)


@pytest.mark.parametrize("kind", DECODERS)
@on_ranks(2)
def test_values_of_the_other_sign_in_the_same_memory(rank: int, world_size: int, kind: str) -> None:
    """As of torch.view_as_real of a conjugate, whose imaginary parts nobody has written."""
    comm = Communicator(timeout=AMPLE)
    q = prompt((1, 4, 5, 64), torch.float32)
    _, message = failure(decode, kind, comm, torch._neg_view(q) if rank else q)
    assert "the queries of rank 1 are not those of rank 0" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, _ = decode(kind, comm, torch._neg_view(-q) if rank else q)
    torch.testing.assert_close(o, whole(q, 2))
    assert_compares(kind, comm, q)


@on_ranks(2)
def test_queries_of_two_dtypes(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    q = prompt((1, 4, 5, 64), torch.bfloat16 if rank else torch.float32)
    k = torch.ones(1, 1, 5, 64, dtype=q.dtype)
    _, message = failure(tree_decode, q, k, k, group=comm, out_dtype=torch.float32)
    assert "dtype is torch.bfloat16 on rank 1, torch.float32 on rank 0" in message
    assert_compares("tree", comm, prompt((1, 4, 5, 64), torch.float32))


def lose_a_rank(rank: int, world_size: int, how: str, lost: int) -> None:
    comm = Communicator(timeout=AMPLE)
    q = prompt((1, 4, 40, 64), torch.float32)
    decode("tree", comm, q)
    comm.timeout = TIMEOUT
    broadcast, count = Link.broadcast, 0

    def stop(link: Link, tensor: Tensor, deadline: float) -> None:
        nonlocal count
        count += 1
        if rank == lost and count == 2:
            end_or_stall(how)
        broadcast(link, tensor, deadline)

    begin = time.monotonic()
    with (
        mock.patch.object(Link, "broadcast", stop),
        mock.patch.object(queries, "_PIECE_BYTES", 8192),
    ):
        _, message = failure(decode, "tree", comm, q + rank)
    assert time.monotonic() - begin < TIMEOUT + SLACK
    # Rank 0 serves the store, where the others would tell one another who is silent.
    expected = f"no word from rank {lost}" if lost else "broadcast of 8192 bytes from rank 0: "
    assert expected in message, message
    assert_refuses_further_use(comm)


@pytest.mark.parametrize("how", tiers(["kill"], ["stop"]))
@pytest.mark.parametrize("lost", tiers([0], [1]))
def test_a_rank_is_lost_while_queries_are_compared(how: str, lost: int) -> None:
    run_ranks(lose_a_rank, 3, how, lost, lost=[lost])
