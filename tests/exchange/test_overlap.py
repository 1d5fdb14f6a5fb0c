# SPDX-License-Identifier: BSD-3-Clause
"""Exchanging a part of a call while the next computes: the same bits, and no traces."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tree_attention.overlap as overlap_module
from distributed import on_ranks, run_ranks
from helpers import assert_same_bits, make_problem, paginate
from sharded import make_layout
from tree_attention import Contiguous, ExchangeError, lean_decode, strategies, tree_decode
from tree_attention._loader import load
from tree_attention.exchange import Communicator
from tree_attention.overlap import Parts, _Lane

State = tuple[Tensor, Tensor]
AMPLE = 20.0


def exchange_threads() -> list[threading.Thread]:
    """The threads of overlapped calls, none of which may outlive its call."""
    return [thread for thread in threading.enumerate() if thread.name == "tree_attention.exchange"]


def test_parts_of_a_call() -> None:
    def of(batch: int, num_heads_q: int, count: int, num_heads_kv: int = 8, sharded: bool = False):
        q, k = torch.empty(batch, num_heads_q, 1, 8), torch.empty(batch, num_heads_kv, 5, 8)
        parts = Parts.of({"q": q, "k": k, "v": k}, count, sharded)
        assert len(parts) == len(parts.bounds) - 1
        return parts.axis, parts.bounds

    assert of(7, 32, 1) == (0, (0, 7)) and of(7, 32, 2) == (0, (0, 3, 7))
    assert of(16, 32, 4) == (0, (0, 4, 8, 12, 16)) and of(2, 32, 100) == (0, (0, 1, 2))
    assert of(1, 32, 1) == (1, (0, 8)) and of(1, 32, 3) == (1, (0, 2, 5, 8))
    assert of(1, 32, 4, num_heads_kv=1) == (1, (0, 1))
    assert of(1, 32, 4, sharded=True) == (0, (0, 1)) and of(4, 32, 2, sharded=True)[1] == (0, 2, 4)
    assert of(0, 32, 2) == (0, (0, 0)) and of(1, 0, 2) == (1, (0, 4, 8))
    assert of(1, 3, 2, num_heads_kv=2) == (0, (0, 1))  # which lean_decode refuses


CASES: dict[str, dict[str, Any]] = {
    "sequences": {"batch": 5},
    "ragged, several queries": {"batch": 3, "seqlen_q": 3, "ranges": "ragged"},
    "rows without keys": {"batch": 3, "seqlen_q": 2, "ranges": "random", "num_heads_kv": 1},
    "alibi": {
        "batch": 2, "seqlen_q": 2, "ranges": "causal", "alibi": True, "key_layout": (0, 1, 1),
    },
    "heads": {"batch": 1, "num_heads_kv": 5, "group_size": 2, "ranges": "left padded"},
    "heads with alibi": {
        "batch": 1, "num_heads_kv": 3, "seqlen_q": 2, "ranges": "window", "alibi": True,
        "key_layout": (0, 1, 1), "dtype": torch.bfloat16,
    },
}  # fmt: skip


def options_of_calls() -> Iterator[dict[str, Any]]:
    yield from ({"strategy": strategy} for strategy in strategies())
    yield {"payload_dtype": torch.bfloat16}
    yield {"head_sharded": True}
    yield {"head_sharded": True, "payload_dtype": torch.bfloat16}


def decode_in_parts(rank: int, world_size: int, case: str) -> list[State]:
    """The result of any number of parts is exact, and equal on all ranks and in every call."""
    arguments, comm = CASES[case], Communicator()
    layout = make_layout("cyclic" if "alibi" in arguments else "uneven", world_size, 40)
    torch.manual_seed(1)
    problem = make_problem(seqlen_k=40, **arguments)
    own = problem.shard(layout, rank)

    def decode(k: Tensor, v: Tensor, **options: Any) -> State:
        options |= own.options
        return tree_decode(own.q, k, v, own.key_ranges, group=comm, **options)

    results = []
    for options in options_of_calls():
        whole = decode(own.k, own.v, **options)
        for overlap in (2, 5):
            first = decode(own.k, own.v, overlap=overlap, **options)
            assert_same_bits(decode(own.k, own.v, overlap=overlap, **options), first)
            if options.get("head_sharded") or options.get("payload_dtype"):
                assert [x.shape for x in first] == [x.shape for x in whole]
                tolerance = 0.05 if options.get("payload_dtype") else 1e-5
                for a, b in zip(first, whole, strict=True):
                    assert torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
            else:
                problem.check(*first)
            if not options.get("head_sharded"):
                results.append(first)
    if own.key_ranges is not None:
        for per_head in (False, True):
            k, v, table = paginate(own.k, own.v, 8, per_head=per_head)
            results.append(decode(k, v, page_table=table, overlap=3))
            problem.check(*results[-1])
    return results


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_same_bits_on_all_ranks(case: str, world_size: int) -> None:
    first, *others = run_ranks(decode_in_parts, world_size, case)
    for results in others:
        for result, expected in zip(results, first, strict=True):
            assert_same_bits(result, expected)


def decode_anything(rank: int, world_size: int, seed: int, arguments: dict[str, Any]) -> State:
    torch.manual_seed(seed)
    overlap, strategy = arguments.pop("overlap"), arguments.pop("strategy")
    problem = make_problem(**arguments)
    bounds = torch.randint(problem.k.shape[2] + 1, (world_size - 1,)).sort().values.tolist()
    own = problem.shard(Contiguous((0, *bounds, problem.k.shape[2])), rank)
    inputs = own.q, own.k, own.v, own.key_ranges
    options = {"strategy": strategy, "group": Communicator(), "num_workers": 3}
    first = tree_decode(*inputs, overlap=overlap, **options)
    problem.check(*first)
    assert_same_bits(tree_decode(*inputs, overlap=overlap, **options), first)
    return first


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    world_size=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
    arguments=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 6),
            "num_heads_kv": st.integers(1, 5),
            "group_size": st.integers(1, 3),
            "seqlen_q": st.integers(1, 3),
            "seqlen_k": st.integers(0, 50),
            "ranges": st.sampled_from(["all", "ragged", "causal", "random"]),
            "overlap": st.integers(1, 4),
            "strategy": st.sampled_from(["all_gather", "two_phase", "hierarchical", "butterfly"]),
        }
    ),
)
def test_any_call_in_parts(world_size: int, seed: int, arguments: dict[str, Any]) -> None:
    first, *others = run_ranks(decode_anything, world_size, seed, arguments)
    for result in others:
        assert_same_bits(result, first)


BATCH, PARTS = 7, 4  # parts of 1, 2, 2 and 2 sequences
Q, KV = torch.ones(BATCH, 4, 1, 32), torch.ones(BATCH, 2, 10, 32)


def count(rank: int, world_size: int, strategy: str, options: dict[str, Any]) -> list[list[int]]:
    comm = Communicator()
    counts = []
    for overlap in (1, PARTS):
        for _ in range(2):
            before = comm.bytes_sent, comm.link.num_operations
            options |= {"strategy": strategy, "overlap": overlap}
            tree_decode(Q, KV, KV, group=comm, **options)
            after = comm.bytes_sent, comm.link.num_operations
            counts.append([b - a for a, b in zip(before, after, strict=True)])
    assert counts[0] == counts[1] and counts[2] == counts[3]
    assert not exchange_threads()
    return [counts[0], counts[2]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_counters(world_size: int) -> None:
    """As many operations for each part, and the same bytes, up to what slices are padded by."""
    row, others = 4 * (32 + 1), world_size - 1

    def slices(rows: int) -> int:
        return 2 * others * -(-rows // world_size) * row

    for whole, parts in run_ranks(count, world_size, "all_gather", {}):
        assert whole == [others * BATCH * 4 * row, 1] and parts == [whole[0], PARTS]
    for whole, parts in run_ranks(count, world_size, "two_phase", {}):
        assert whole == [slices(BATCH * 4), 2]
        assert parts == [slices(4) + 3 * slices(8), 2 * PARTS]
    for whole, parts in run_ranks(count, world_size, "two_phase", {"head_sharded": True}):
        assert parts == [whole[0], PARTS]


@on_ranks(2)
def test_exchanges_run_while_parts_compute(rank: int, world_size: int) -> None:
    """No rank computes the second part before all have exchanged the first."""
    comm = Communicator(timeout=AMPLE)
    expected = tree_decode(Q, KV, KV, group=comm, overlap=PARTS)
    num_done = comm.link.num_operations
    threads = []

    def lean_decode_of_part(*args: Any, **options: Any) -> State:
        threads.append(threading.current_thread())
        end = time.monotonic() + AMPLE
        while comm.link.num_operations < num_done + len(threads) - 1:
            assert time.monotonic() < end, "exchanges wait for the computation"
            time.sleep(0.001)
        return lean_decode(*args, **options)

    with mock.patch.object(overlap_module, "lean_decode", lean_decode_of_part):
        with torch.inference_mode():
            result = tree_decode(Q, KV, KV, group=comm, overlap=PARTS)
        assert result[0].is_inference()
        assert len(threads) == PARTS and set(threads) == {threading.main_thread()}
        num_done, threads = comm.link.num_operations, []
        again = tree_decode(Q, KV, KV, group=comm, overlap=PARTS)
    assert_same_bits(result, expected)
    assert_same_bits(again, expected)
    assert not exchange_threads()


@on_ranks(2)
def test_explain(rank: int, world_size: int) -> None:
    comm, printed = Communicator(), StringIO()
    with redirect_stdout(printed):
        tree_decode(Q, KV, KV, group=comm, overlap=PARTS, explain=True)
    assert printed.getvalue().count("exchange of 4 rows of 32 (528 bytes)") == (rank == 0)


class FakeStream:
    """Notes what is queued, on which stream."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.device = torch.device("cuda", 0)
        self._name, self._log = name, log

    def record_event(self) -> str:
        return f"all so far on {self._name}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self._name} waits for {event}")

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")


@pytest.mark.parametrize("host_waits", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_streams(host_waits: bool, fails: bool) -> None:
    """Exchanges wait for what they send and the caller for all, also after an error."""
    log: list[str] = []
    current, side = (FakeStream(name, log) for name in ("current", "side"))

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        assert (threading.current_thread() is not threading.main_thread()) == host_waits
        assert stream is side
        yield

    def exchange(i: int) -> None:
        log.append(f"exchange {i}")
        if fails and i == 1:
            raise ExchangeError("lost")

    reasons: list[str] = []
    with (
        mock.patch.object(torch.cuda, "Stream", lambda device: side),
        mock.patch.object(torch.cuda, "current_stream", lambda device: current),
        mock.patch.object(torch.cuda, "stream", on),
        pytest.raises(ExchangeError) if fails else nullcontext(),
        _Lane(torch.device("cuda", 0), host_waits, reasons.append) as lane,
    ):
        for i in range(2):
            log.append(f"compute {i}")
            lane.submit(partial(exchange, i))
    assert log[-1] == "current waits for side" and not reasons
    aside = [line for line in log[:-1] if not line.startswith("compute")]
    wait = "side waits for all so far on current"
    assert aside == [wait, "exchange 0", wait, "exchange 1"]
    assert not exchange_threads()


def test_one_thread() -> None:
    """A thread that keeps its loops to itself takes no other threads' away."""
    before, seen = torch.get_num_threads(), []

    def run_alone() -> None:
        load().use_one_thread()
        seen.append(torch.get_num_threads())

    for run in (run_alone, lambda: seen.append(torch.get_num_threads())):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [1, before] and torch.get_num_threads() == before
