# SPDX-License-Identifier: BSD-3-Clause
"""A call in parts that fails or is refused: an error on every rank, and nothing stays behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tree_attention.overlap as overlap_module
from distributed import Lost, on_ranks, run_ranks
from faults import end_or_stall
from helpers import assert_same_bits
from test_overlap import AMPLE, BATCH, KV, PARTS, Q, State, exchange_threads
from tree_attention import ExchangeError, lean_decode, tree_decode
from tree_attention.exchange import Communicator

TIMEOUT, SLACK = 0.5, 1.5


def failing_at(index: int, fail: Callable[[], None]) -> Callable[..., State]:
    """A `lean_decode` that fails at the call of this number."""
    num_calls = 0

    def lean_decode_until(*args: Any, **options: Any) -> State:
        nonlocal num_calls
        num_calls += 1
        if num_calls == index + 1:
            fail()
        return lean_decode(*args, **options)

    return lean_decode_until


def decode_until(
    rank: int, world_size: int, victim: int, how: str, strategy: str
) -> tuple[float, str]:
    comm = Communicator(timeout=TIMEOUT if how == "stop" else AMPLE)

    def fail() -> None:
        if how == "raise":
            raise IndexError("of the third part")
        end = time.monotonic() + AMPLE
        while comm.link.num_operations == num_operations and time.monotonic() < end:
            time.sleep(0.001)
        end_or_stall(how)

    options = {"group": comm, "overlap": PARTS, "strategy": strategy}
    tree_decode(Q, KV, KV, timeout=AMPLE, **options)
    dist.barrier()
    num_operations = comm.link.num_operations
    error = IndexError if rank == victim else ExchangeError
    attention = failing_at(2, fail) if rank == victim else lean_decode
    begin = time.monotonic()
    with (
        mock.patch.object(overlap_module, "lean_decode", attention),
        pytest.raises(error, match="of the third part" if rank == victim else ""),
    ):
        tree_decode(Q, KV, KV, **options)
    seconds = time.monotonic() - begin
    assert not exchange_threads() and comm.failed is not None
    if how != "raise":
        assert comm.link.num_operations > num_operations, "no part was exchanged before"
    with pytest.raises(ExchangeError, match="has failed before"):
        tree_decode(Q, KV, KV, **options)
    return seconds, comm.failed


@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
@pytest.mark.parametrize("world_size, strategy", [(2, "all_gather"), (3, "two_phase"),
                                                  (4, "butterfly")])  # fmt: skip
def test_rank_lost_between_parts(world_size: int, strategy: str, how: str) -> None:
    lost = () if how == "raise" else (1,)
    arguments = (1, how, strategy)
    results = run_ranks(decode_until, world_size, *arguments, lost=lost, fresh=True)
    for rank, result in enumerate(results):
        if isinstance(result, Lost):
            continue
        seconds, message = result
        # Parts that came before the lost one had deadlines of their own.
        assert seconds < (3 * TIMEOUT + SLACK if how == "stop" else 5.0), message
        if rank == 1:
            assert message.startswith("aborted: interrupted by IndexError('of the third part')")


@on_ranks(2)
def test_refused_arguments(rank: int, world_size: int) -> None:
    """What is refused at the first part is refused before anything is sent."""
    comm = Communicator(timeout=AMPLE)
    for _ in range(2):
        good = tree_decode(Q, KV, KV, group=comm, overlap=PARTS)
    sent = comm.bytes_sent
    for arguments in (
        (Q, KV[:6], KV), (Q, KV, torch.cat([KV, KV])), (Q, KV, KV[..., :5, :]),
        (Q, KV.half(), KV), (Q, KV, KV, torch.ones(BATCH + 1, 1, 2).int()),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="lean_decode: "):
            tree_decode(*arguments, group=comm, overlap=PARTS)
    with pytest.raises(RuntimeError, match="lean_decode: softcap"):
        tree_decode(Q, KV, KV, group=comm, overlap=PARTS, softcap=-1.0)
    with pytest.raises(ValueError, match=r"tree_decode: out_dtype must be float32, .* got tor"):
        tree_decode(Q, KV, KV, group=comm, overlap=PARTS, out_dtype=torch.float64)
    assert comm.bytes_sent == sent and comm.failed is None
    for _ in range(2):
        assert_same_bits(tree_decode(Q, KV, KV, group=comm, overlap=PARTS), good)
    sent = comm.bytes_sent
    with (
        mock.patch.object(overlap_module, "lean_decode", side_effect=IndexError("first")),
        pytest.raises(IndexError, match="first"),
    ):
        tree_decode(Q, KV, KV, group=comm, overlap=PARTS)
    assert comm.bytes_sent == sent and comm.failed is None
    assert_same_bits(tree_decode(Q, KV, KV, group=comm, overlap=PARTS), good)
    with pytest.raises(ExchangeError, match="overlap is 2 on rank 1, 3 on rank 0"):
        tree_decode(Q, KV, KV, group=Communicator(), overlap=2 if rank == 1 else 3)
    assert not exchange_threads()


@on_ranks(2)
def test_arguments_as_long_as_a_part_are_refused(rank: int, world_size: int) -> None:
    """Arguments as long as a part are refused, as they are where a call is not cut."""
    comm = Communicator(timeout=AMPLE)
    q, kv = torch.ones(4, 4, 1, 8), torch.ones(4, 4, 5, 8)
    positions, table = torch.zeros(1, 1).long(), torch.zeros(1, 2).int()
    slopes = {"alibi_slopes": torch.ones(1), "query_positions": positions}
    for arguments, options, refused in (
        ((q, kv, kv, torch.zeros(1, 1, 2).int()), {}, "key_ranges"),
        ((q, kv[:1], kv[:1]), {}, "k must have q's batch 4, got 1"),
        ((q, kv, kv), {"page_table": table}, "page_table"),
        ((q, kv, kv), {"query_positions": positions}, "query_positions"),
        ((q[:1], kv[:1], kv[:1, :1]), {}, "v must have k's first three axes"),
        ((q[:1], kv[:1], kv[:1]), slopes, "alibi_slopes"),
    ):
        with pytest.raises(RuntimeError, match=f"lean_decode: {refused}"):
            tree_decode(*arguments, group=comm, overlap=4, **options)
    assert comm.bytes_sent == 0 and comm.failed is None


@on_ranks(2)
def test_strategy_that_is_not_available(rank: int, world_size: int) -> None:
    """Refused in every call alike, and nothing is sent."""
    comm = Communicator(timeout=AMPLE)
    for _ in range(3):
        with pytest.raises(ExchangeError, match="one_shot is not available: tensors are on"):
            tree_decode(Q, KV, KV, group=comm, overlap=PARTS, strategy="one_shot")
    assert comm.failed is None and comm.bytes_sent == 0
    tree_decode(Q, KV, KV, group=comm, overlap=PARTS)


@on_ranks(2, fresh=True)
def test_abort_between_parts(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    tree_decode(Q, KV, KV, group=comm, overlap=PARTS)
    dist.barrier()
    if rank == 1:
        return
    stop = failing_at(2, lambda: comm.abort("no longer wanted"))
    with (
        mock.patch.object(overlap_module, "lean_decode", stop),
        pytest.raises(ExchangeError, match="aborted: no longer wanted"),
    ):
        tree_decode(Q, KV, KV, group=comm, overlap=PARTS)
    assert not exchange_threads()


@pytest.mark.parametrize("overlap", [0, -1, True, None, 1.5])
def test_refused_numbers_of_parts(overlap: Any) -> None:
    message = f"tree_decode: overlap must be an integer of at least 1, got {overlap}"
    with pytest.raises(ValueError, match=message):
        tree_decode(Q, KV, KV, overlap=overlap)
