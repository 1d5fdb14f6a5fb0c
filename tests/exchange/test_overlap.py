# SPDX-License-Identifier: BSD-3-Clause
"""Exchanging a part of a call while the next computes: the same bits, or an error, no traces."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tree_attention.decode as tree_module
from distributed import Lost, run_ranks
from helpers import assert_same_bits, make_problem, paginate
from sharded import make_layout
from tree_attention import Contiguous, ExchangeError, lean_decode, strategies, tree_decode
from tree_attention._loader import load
from tree_attention.exchange import Communicator, chunks
from tree_attention.exchange.chunks import Chunks, Forecast, Speed
from tree_attention.exchange.costs import DEFAULT_COSTS
from tree_attention.exchange.overlap import Overlap
from tree_attention.exchange.state import Message
from tree_attention.exchange.strategies import STRATEGIES

State = tuple[Tensor, Tensor]
TIMEOUT, SLACK, AMPLE = 0.5, 1.5, 20.0


def exchange_threads() -> list[threading.Thread]:
    """Those of overlapped calls, none of which may outlive its call."""
    return [thread for thread in threading.enumerate() if thread.name == "tree_attention.exchange"]


@contextmanager
def small_chunks(min_bytes: int = 1, min_seconds: float = 0.0) -> Iterator[None]:
    """Chunks of calls that are small enough for a test."""
    speed = Speed(20e9, 100e9, min_seconds)
    with (
        mock.patch.object(chunks, "_MIN_MESSAGE_BYTES", min_bytes),
        mock.patch.dict(chunks._SPEEDS, {"cpu": speed, "cuda": speed}),
    ):
        yield


def test_chunks_of_a_state() -> None:
    def of(*shape: int, head_dim: int = 128, num_heads_kv: int = 8) -> tuple[int, tuple[int, ...]]:
        result = Chunks.of(Message(shape, head_dim, torch.float32), num_heads_kv)
        return result.axis, result.bounds

    # Messages of 16.5 kB for each sequence.
    assert of(7, 32, 1) == (0, (0, 7)) and of(15, 32, 1) == (0, (0, 15))
    assert of(16, 32, 1) == (0, (0, 8, 16)) and of(17, 32, 1) == (0, (0, 8, 17))
    assert of(64, 32, 1) == of(64, 32, 1) == (0, (0, 16, 32, 48, 64))
    assert of(2, 32, 1000) == (0, (0, 1, 2))
    assert of(1, 32, 1) == (1, (0, 8)) and of(1, 32, 24) == (1, (0, 2, 5, 8))
    assert of(1, 32, 24, num_heads_kv=1) == (1, (0, 1))
    assert of(0, 32, 1) == (0, (0, 0)) and of(1, 0, 1) == (1, (0, 8))
    assert of(1, 3, 1000, num_heads_kv=2) == (0, (0, 1))  # which lean_decode refuses


def test_forecast() -> None:
    cpu = torch.device("cpu")
    assert Forecast(4, 40e-3, 20e-3, 6e-3).pays(cpu)
    forecast = Forecast(4, 40e-3, 20e-3, 12e-3)
    assert forecast.after == pytest.approx(60e-3) and forecast.during == pytest.approx(58e-3)
    assert not forecast.pays(cpu)  # not clearly
    assert not Forecast(4, 20e-3, 20e-3, 5e-3).pays(cpu)  # nobody computes in chunks
    slow_links = Forecast(2, 40e-3, 1.0, 0.5)
    assert slow_links.during == pytest.approx(1.02) and not slow_links.pays(cpu)
    text = "attention 40,000.0 us on the slowest rank; with one exchange 60,000.0 us, with 4 that"
    assert text in str(forecast)


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


def ways() -> Iterator[dict[str, Any]]:
    """Arguments of tree_decode between which overlapping must change no bit."""
    yield from ({"strategy": strategy} for strategy in strategies())
    yield from ({"payload_dtype": dtype} for dtype in (torch.float32, torch.bfloat16))
    yield {"head_sharded": True}
    yield {"head_sharded": True, "payload_dtype": torch.bfloat16}


def decode_every_way(rank: int, world_size: int, case: str) -> None:
    arguments, comm = CASES[case], Communicator()
    layout = make_layout("cyclic" if "alibi" in arguments else "uneven", world_size, 40)
    torch.manual_seed(1)
    problem = make_problem(seqlen_k=40, **arguments)
    own = problem.shard(layout, rank)

    def decode(k: Tensor, v: Tensor, **options: Any) -> State:
        options |= own.options
        return tree_decode(own.q, k, v, own.key_ranges, group=comm, **options)

    with small_chunks():
        for options in ways():
            expected = decode(own.k, own.v, overlap=False, **options)
            if len(options) == 1 and "strategy" in options:
                problem.check(*expected)
            exact = STRATEGIES[options.get("strategy", "all_gather")].is_canonical
            for overlap in (True, True, None):  # the first call compares signatures
                result = decode(own.k, own.v, overlap=overlap, **options)
                if exact:
                    assert_same_bits(result, expected)
                else:
                    problem.check(*result)
        if own.key_ranges is not None:
            for per_head in (False, True):
                k, v, table = paginate(own.k, own.v, 8, per_head=per_head)
                first, *others = (
                    decode(k, v, page_table=table, overlap=o) for o in (False, True, True)
                )
                problem.check(*first)
                for result in others:
                    assert_same_bits(result, first)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str, world_size: int) -> None:
    run_ranks(decode_every_way, world_size, case)


def decode_anything(rank: int, world_size: int, seed: int, arguments: dict[str, Any]) -> None:
    torch.manual_seed(seed)
    min_bytes, strategy = arguments.pop("min_bytes"), arguments.pop("strategy")
    problem = make_problem(**arguments)
    bounds = torch.randint(problem.k.shape[2] + 1, (world_size - 1,)).sort().values.tolist()
    own = problem.shard(Contiguous((0, *bounds, problem.k.shape[2])), rank)
    comm = Communicator()
    # A rank with few keys may compute at once what others compute in chunks.
    with small_chunks(min_bytes, own.k.nbytes / 20e9 if rank == seed % world_size else 0.0):
        for num_workers in (0, 3):
            inputs = own.q, own.k, own.v, own.key_ranges
            options = {"strategy": strategy, "group": comm, "num_workers": num_workers}
            expected = tree_decode(*inputs, overlap=False, **options)
            problem.check(*expected)
            for _ in range(2):
                assert_same_bits(tree_decode(*inputs, overlap=True, **options), expected)


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
            "min_bytes": st.sampled_from([1, 2000, 6000]),
            "strategy": st.sampled_from(["all_gather", "two_phase", "hierarchical", "butterfly"]),
        }
    ),
)
def test_same_bits_of_anything(world_size: int, seed: int, arguments: dict[str, Any]) -> None:
    run_ranks(decode_anything, world_size, seed, arguments)


BATCH, CHUNKS = 7, 4  # of 1, 2, 2 and 2 sequences
Q, KV = torch.ones(BATCH, 4, 1, 32), torch.ones(BATCH, 2, 10, 32)


def count(rank: int, world_size: int, strategy: str, options: dict[str, Any]) -> list[list[int]]:
    comm = Communicator()
    counts = []
    with small_chunks():
        for overlap in (False, True):
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
    """As many operations for each chunk, and the same bytes, up to what slices are padded by."""
    row, others = 4 * (32 + 1), world_size - 1

    def slices(rows: int) -> int:
        return 2 * others * -(-rows // world_size) * row

    for whole, parts in run_ranks(count, world_size, "all_gather", {}):
        assert whole == [others * BATCH * 4 * row, 1] and parts == [whole[0], CHUNKS]
    for whole, parts in run_ranks(count, world_size, "two_phase", {}):
        assert whole == [slices(BATCH * 4), 2]
        assert parts == [slices(4) + 3 * slices(8), 2 * CHUNKS]
    for whole, parts in run_ranks(count, world_size, "two_phase", {"head_sharded": True}):
        assert parts == [whole[0], CHUNKS]


def alternate(rank: int, world_size: int) -> None:
    """The second chunk is computed on no rank before the first has been exchanged by all."""
    comm = Communicator(timeout=AMPLE)
    with small_chunks():
        expected = tree_decode(Q, KV, KV, group=comm, overlap=True)
        num_done = comm.link.num_operations
        threads = []

        def lean_decode_of_chunk(*args: Any, **options: Any) -> State:
            threads.append(threading.current_thread())
            end = time.monotonic() + AMPLE
            while comm.link.num_operations < num_done + len(threads) - 1:
                assert time.monotonic() < end, "exchanges wait for the computation"
                time.sleep(0.001)
            return lean_decode(*args, **options)

        with mock.patch.object(tree_module, "lean_decode", lean_decode_of_chunk):
            with torch.inference_mode():
                result = tree_decode(Q, KV, KV, group=comm, overlap=True)
            assert result[0].is_inference()
            assert len(threads) == CHUNKS and set(threads) == {threading.main_thread()}
            num_done, threads = comm.link.num_operations, []
            again = tree_decode(Q, KV, KV, group=comm, overlap=True)
    assert_same_bits(result, expected)
    assert_same_bits(again, expected)
    assert not exchange_threads()


def test_exchanges_run_while_chunks_compute() -> None:
    run_ranks(alternate, 2)


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
            raise IndexError("of the third chunk")
        end = time.monotonic() + AMPLE
        while comm.link.num_operations == num_operations and time.monotonic() < end:
            time.sleep(0.001)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

    options = {"group": comm, "overlap": True, "strategy": strategy}
    with small_chunks():
        tree_decode(Q, KV, KV, timeout=AMPLE, **options)
        dist.barrier()
        num_operations = comm.link.num_operations
        error = IndexError if rank == victim else ExchangeError
        attention = failing_at(2, fail) if rank == victim else lean_decode
        begin = time.monotonic()
        with (
            mock.patch.object(tree_module, "lean_decode", attention),
            pytest.raises(error, match="of the third chunk" if rank == victim else ""),
        ):
            tree_decode(Q, KV, KV, **options)
        seconds = time.monotonic() - begin
        assert not exchange_threads() and comm.failed is not None
        if how != "raise":
            assert comm.link.num_operations > num_operations, "no chunk was exchanged before"
        with pytest.raises(ExchangeError, match="has failed before"):
            tree_decode(Q, KV, KV, **options)
    return seconds, comm.failed


@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
@pytest.mark.parametrize("world_size, strategy", [(2, "all_gather"), (3, "two_phase"),
                                                  (4, "butterfly")])  # fmt: skip
def test_rank_lost_between_chunks(world_size: int, strategy: str, how: str) -> None:
    lost = () if how == "raise" else (1,)
    arguments = (1, how, strategy)
    results = run_ranks(decode_until, world_size, *arguments, lost=lost, fresh=True)
    for rank, result in enumerate(results):
        if isinstance(result, Lost):
            continue
        seconds, message = result
        # Chunks that came before the lost one had deadlines of their own.
        assert seconds < (3 * TIMEOUT + SLACK if how == "stop" else 5.0), message
        if rank == 1:
            assert message.startswith("interrupted by IndexError('of the third chunk')")


def refuse(rank: int, world_size: int) -> None:
    """What is refused at the first chunk is refused before anything is sent."""
    comm = Communicator(timeout=AMPLE)
    with small_chunks():
        for _ in range(2):
            good = tree_decode(Q, KV, KV, group=comm, overlap=True)
        sent = comm.bytes_sent
        for arguments in (
            (Q, KV[:6], KV), (Q, KV, torch.cat([KV, KV])), (Q, KV, KV[..., :5, :]),
            (Q, KV.half(), KV), (Q, KV, KV, torch.ones(BATCH + 1, 1, 2).int()),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="lean_decode: "):
                tree_decode(*arguments, group=comm, overlap=True)
        with pytest.raises(RuntimeError, match="lean_decode: softcap"):
            tree_decode(Q, KV, KV, group=comm, overlap=True, softcap=-1.0)
        assert comm.bytes_sent == sent and comm.failed is None
        for _ in range(2):
            assert_same_bits(tree_decode(Q, KV, KV, group=comm, overlap=True), good)
        sent = comm.bytes_sent
        with (
            mock.patch.object(tree_module, "lean_decode", side_effect=IndexError("first")),
            pytest.raises(IndexError, match="first"),
        ):
            tree_decode(Q, KV, KV, group=comm, overlap=True)
        assert comm.bytes_sent == sent and comm.failed is None
        assert_same_bits(tree_decode(Q, KV, KV, group=comm, overlap=True), good)
        with pytest.raises(ExchangeError, match="overlap is True on rank 1, None on rank 0"):
            tree_decode(Q, KV, KV, group=Communicator(), overlap=True if rank == 1 else None)
    assert not exchange_threads()


def test_refused_arguments() -> None:
    run_ranks(refuse, 2)


def ask_for_one_shot(rank: int, world_size: int) -> None:
    """Refused in every call alike, and nothing is sent."""
    comm = Communicator(timeout=AMPLE)
    with small_chunks():
        for _ in range(3):
            with pytest.raises(ExchangeError, match="one_shot is not available: tensors are on"):
                tree_decode(Q, KV, KV, group=comm, overlap=True, strategy="one_shot")
        assert comm.failed is None and comm.bytes_sent == 0
        tree_decode(Q, KV, KV, group=comm, overlap=True)


def test_strategy_that_is_not_available() -> None:
    run_ranks(ask_for_one_shot, 2)


def abort(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    with small_chunks():
        tree_decode(Q, KV, KV, group=comm, overlap=True)
        dist.barrier()
        if rank == 1:
            return
        stop = failing_at(2, lambda: comm.abort("no longer wanted"))
        with (
            mock.patch.object(tree_module, "lean_decode", stop),
            pytest.raises(ExchangeError, match="aborted: no longer wanted"),
        ):
            tree_decode(Q, KV, KV, group=comm, overlap=True)
    assert not exchange_threads()


def test_abort_between_chunks() -> None:
    run_ranks(abort, 2, fresh=True)


def decide(rank: int, world_size: int) -> list[tuple[bool, int]]:
    """One rank's shard is a thousand times as long as the next one's."""
    results = []
    for batch, bandwidth in ((7, 1e3), (7, 1e12), (1, 1e3)):
        q, heads = torch.ones(batch, 4, 1, 32), 1 if batch == 1 else 2
        kv = torch.ones(batch, heads, 3000 if rank == 0 else 3 * rank, 32)
        comm = Communicator(costs=replace(DEFAULT_COSTS["gloo"], bytes_inside=1 / bandwidth))
        speed = {"cpu": Speed(1e6, 1e12, 1e-2)}  # rank 0 takes 10 s
        with small_chunks(), mock.patch.dict(chunks._SPEEDS, speed):
            for _ in range(2):
                before = comm.link.num_operations
                tree_decode(q, kv, kv, group=comm, strategy="all_gather")
            results.append((comm._is_overlapped, comm.link.num_operations - before))
    return results


def test_decisions_are_equal_on_all_ranks() -> None:
    expected = [(True, CHUNKS), (False, 1), (False, 1)]
    assert run_ranks(decide, 3) == [expected] * 3


def explain(rank: int, world_size: int) -> None:
    comm, printed = Communicator(), StringIO()
    with small_chunks(), redirect_stdout(printed):
        for overlap in (True, None):
            for _ in range(2):
                tree_decode(Q, KV, KV, group=comm, overlap=overlap, explain=True)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("attention ")]
    assert len(lines) == (4 if rank == 0 else 0)
    assert all(" with one exchange " in line and "with 4 that overlap it" in line for line in lines)
    assert [line.split(": ")[1] for line in lines[:2]] == ["overlapped"] * len(lines[:2])


def test_explain() -> None:
    run_ranks(explain, 2)


class PretendedStream:
    """Notes what is queued, on which stream."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.device = torch.device("cuda", 0)
        self._name, self._log = name, log

    def record_event(self) -> str:
        return f"all so far on {self._name}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self._name} waits for {event}")

    def wait_stream(self, other: PretendedStream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")


@pytest.mark.parametrize("host_waits", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_streams(host_waits: bool, fails: bool) -> None:
    """Exchanges wait for what they send and the caller for all, also after an error."""
    log: list[str] = []
    current, side = (PretendedStream(name, log) for name in ("current", "side"))

    @contextmanager
    def on(stream: PretendedStream) -> Iterator[None]:
        assert (threading.current_thread() is not threading.main_thread()) == host_waits
        assert stream is side
        yield

    def exchange(i: int) -> None:
        log.append(f"exchange {i}")
        if fails and i == 1:
            raise ExchangeError("lost")

    failures: list[BaseException] = []
    with (
        mock.patch.object(torch.cuda, "Stream", lambda device: side),
        mock.patch.object(torch.cuda, "current_stream", lambda device: current),
        mock.patch.object(torch.cuda, "stream", on),
    ):
        overlap = Overlap(torch.device("cuda", 0), host_waits)
        steps = [partial(exchange, i) for i in range(2)]
        computations = [partial(log.append, f"compute {i}") for i in range(2)]
        with pytest.raises(ExchangeError) if fails else nullcontext():
            overlap.run(computations, steps, failures.append)
    assert log[-1] == "current waits for side" and len(failures) == fails
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
