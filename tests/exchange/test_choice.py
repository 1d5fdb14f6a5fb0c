# SPDX-License-Identifier: BSD-3-Clause
"""What strategies cost, and what "auto" takes by its rule and by measured times."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distributed import on_ranks, run_ranks
from tiers import tiers
from tree_attention import ExchangeError, strategies, tree_decode
from tree_attention.exchange import Communicator, Topology, calibration
from tree_attention.exchange.auto.choose import RULES, CostTable, Measured, MeasuredHost, choose
from tree_attention.exchange.calibration import Clock
from tree_attention.exchange.strategies import STRATEGIES, candidates
from tree_attention.exchange.transport.buffers import StateLayout

F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
KIB, MIB = 1 << 10, 1 << 20
CANONICAL = [name for name in strategies() if STRATEGIES[name].is_canonical]


def layout_of(num_bytes: int, dtype: torch.dtype = F32) -> StateLayout:
    """A state of heads of 127 values, of `num_bytes` in float32."""
    return StateLayout((1, num_bytes // 512, 1), 127, dtype)


def count_bytes(rank: int, world_size: int, nodes: str) -> dict[tuple[Any, ...], int]:
    comm = Communicator(nodes=nodes)
    sent = {}
    o, lse = torch.ones(1, 10, 1, 12), torch.zeros(1, 10, 1)
    for payload_dtype in (F32, BF16):
        for head_sharded in (False, True):
            for strategy in sorted(
                set(candidates(payload_dtype, head_sharded)) & set(strategies())
            ):
                before = comm.bytes_sent
                comm.all_merge_states(
                    o,
                    lse,
                    strategy=strategy,
                    out_dtype=payload_dtype,
                    payload_dtype=payload_dtype,
                    head_sharded=head_sharded,
                )
                sent[strategy, payload_dtype, head_sharded] = comm.bytes_sent - before
    return sent


@pytest.mark.parametrize(
    "nodes", tiers(["aa", "ab", "aaab"], ["aaa", "aabb", "aaaaa", "aabbcc", "aaaabbc"])
)
def test_bytes_of_the_formulas_are_those_sent(nodes: str) -> None:
    """By the rank that sends most."""
    by_rank = run_ranks(count_bytes, len(nodes), nodes)
    topology = Topology.of(nodes)
    for strategy, dtype, sharded in by_rank[0]:
        layout = StateLayout((1, 10, 1), 12, dtype)
        traffic = STRATEGIES[strategy].traffic(layout, topology, dtype, sharded)
        assert traffic.bytes_sent == max(sent[strategy, dtype, sharded] for sent in by_rank)


def test_steps() -> None:
    """Between 8 ranks on one node, on two and on eight."""
    layout = layout_of(32 * KIB)
    topologies = [Topology.of(nodes) for nodes in ("a" * 8, "aaaabbbb", "abcdefgh")]

    def of(strategy: str) -> list[int]:
        formula = STRATEGIES[strategy].traffic
        return [formula(layout, topology, F32, False).steps for topology in topologies]

    assert of("all_gather") == of("one_shot") == [1, 1, 1]
    assert of("two_phase") == [2, 2, 2]
    assert of("hierarchical") == [2, 3, 1]
    assert of("butterfly") == [3, 3, 3]
    # Rings: each all-reduce is a reduce-scatter and an all-gather of 7 steps.
    assert of("three_allreduce") == [42, 42, 42]
    assert STRATEGIES["two_phase"].traffic(layout, topologies[0], F32, True).steps == 1


@pytest.mark.parametrize(
    "nodes, backend, num_bytes, chosen",
    [
        ("ab", "gloo", KIB, "all_gather"),
        ("aaa", "gloo", 512 * KIB, "all_gather"),
        ("ab", "gloo", MIB, "two_phase"),
        ("abcd", "gloo", 32 * KIB, "all_gather"),
        ("abcd", "gloo", 33 * KIB, "two_phase"),
        ("abcdefgh", "gloo", 32 * KIB, "butterfly"),
        ("aaaaaaaa", "gloo", 33 * KIB, "two_phase"),
        ("aabb", "gloo", 32 * KIB, "all_gather"),
        ("aabb", "gloo", 33 * KIB, "hierarchical"),
        ("aaabbb", "gloo", 33 * KIB, "two_phase"),  # nodes of three ranks cannot merge first
        ("aabb", "something else", 33 * KIB, "hierarchical"),
        ("aaaa", "nccl", KIB, "one_shot"),
        ("aaaa", "nccl", 3 * MIB, "two_phase"),
        ("abcd", "nccl", 128 * KIB, "all_gather"),
        ("abcd", "nccl", 129 * KIB, "two_phase"),
        ("aabb", "nccl", KIB, "hierarchical"),
        ("abc", "nccl", MIB, "all_gather"),
    ],
)
def test_shipped_rule(nodes: str, backend: str, num_bytes: int, chosen: str) -> None:
    choice = choose(layout_of(num_bytes), Topology.of(nodes), backend)
    assert choice.strategy == chosen and choice.reason.startswith("shipped rule: ")


def test_shipped_rule_takes_what_can_be_had() -> None:
    topology, layout = Topology.of("aaaa"), layout_of(KIB)
    choice = choose(layout, topology, "nccl", unavailable={"one_shot": "no"})
    assert choice.strategy == "all_gather"
    choice = choose(layout, topology, "gloo", head_sharded=True)
    assert choice.strategy == "two_phase" and choice.reason == "the only strategy that can do it"
    everything = dict.fromkeys({rule.strategy for rule in RULES} - {"two_phase"}, "no")
    choice = choose(layout, topology, "gloo", unavailable=everything)
    assert choice.strategy == "two_phase"
    for rule in RULES:
        assert STRATEGIES[rule.strategy].is_canonical


def test_interpolated_times() -> None:
    rows = [("all_gather", 1024, 1e-3), ("all_gather", 4096, 4e-3), ("two_phase", 2048, 2.5e-3)]
    table = CostTable("gloo", (0, 1), tuple(Measured(*row) for row in rows))
    assert table.seconds("all_gather", 1024) == 1e-3 and table.seconds("all_gather", 1) == 1e-3
    assert table.seconds("all_gather", 2048) == pytest.approx(2e-3)
    assert table.seconds("all_gather", 4096) == 4e-3
    assert table.seconds("all_gather", 8192) == pytest.approx(8e-3)
    assert table.seconds("butterfly", 2048) is None


@given(
    times=st.lists(
        st.tuples(st.sampled_from(CANONICAL), st.integers(1, 64), st.floats(1e-6, 1.0)), min_size=1
    ),
    size=st.integers(1, 100),
)
def test_measured_times_decide(times: list[tuple[str, int, float]], size: int) -> None:
    """The least of the strategies' times; a measured size has its measured time."""
    table = CostTable(
        "gloo", (0, 1, 2, 3), tuple(Measured(name, 512 * n, s) for name, n, s in times)
    )
    layout, topology = layout_of(512 * size), Topology.of("abcd")
    choice = choose(layout, topology, "gloo", costs=table)
    known = {name: table.seconds(name, 512 * size) for name, _, _ in times}
    assert known[choice.strategy] == min(known.values())
    assert choice.reason.startswith("measured on these ranks: " + choice.strategy)
    last = {(name, n): seconds for name, n, seconds in times}
    for (name, n), seconds in last.items():
        assert table.seconds(name, 512 * n) == pytest.approx(seconds)
    # Times of other ranks, or of another library, say nothing.
    for others in (("aabb", "gloo"), ("abc", "gloo"), ("abcd", "nccl")):
        choice = choose(layout, Topology.of(others[0]), others[1], costs=table)
        assert choice.reason.startswith("shipped rule")


def test_file_of_a_table(tmp_path: Path) -> None:
    table = CostTable("gloo", (0, 0, 1), (Measured("all_gather", 1024, 0.25),))
    path = tmp_path / "costs.json"
    table.save(path, {"host": "here"})
    assert CostTable.load(path) == table and CostTable.load(path).digest == table.digest
    content = json.loads(path.read_text())
    assert content["host"] == "here" and len(path.read_text().splitlines()) == 3
    hosts = tuple(MeasuredHost("here", 6e10, 5e10, 2e12, 64e9, i * 1e-3) for i in range(3))
    replace(table, machines=hosts).save(path, {})
    assert CostTable.load(path).machines == hosts and CostTable.load(path).digest != table.digest
    # Of releases that measured no hosts, or of these no layers.
    rates = {"host": "here", "read": 6e10, "flop": 2e12, "memory": 64e9}
    for old in ({"format": 3}, {"format": 4, "machines": 3 * [rates]}):
        path.write_text(json.dumps(content | old))
        assert CostTable.load(path) == table
    row = {"strategy": "all_gather", "num_bytes": 1, "seconds": 1.0}
    host = rates | {"weights": 5e10, "layer": 1e-3}
    for change, says in (
        ({"format": 2}, "it was written by another version"),
        ({"backend": None}, "backend must be a string, got None"),
        ({"nodes": None}, "nodes must be a list of integers, got None"),
        ({"nodes": [0, "1"]}, r"nodes must be a list of integers, got \[0, '1'\]"),
        ({"machines": None}, "machines must be a list of none or 3, got None"),
        ({"machines": [host]}, "machines must be a list of none or 3, got"),
        ({"machines": [3, 3, 3]}, "machines must each have a host, read, weights, flop, memory of"),
        *(
            ({"machines": 3 * [host | {name: value}]}, "memory of 1 to 1e.18, and layer, seconds")
            for name in ("read", "weights", "flop", "memory", "host")
            for value in (0.0, -1, math.inf, math.nan, None, True, 10**400)
        ),
        *(
            ({"machines": 3 * [host | {"layer": value}]}, "layer, seconds of 0 to 10,000,000, got")
            for value in (-1e-9, math.inf, math.nan, None, True, "0", 10**400)
        ),
        ({"exchanges": None}, "exchanges must be a list, got None"),
        ({"exchanges": [3]}, "seconds of 1e-09 to 10,000,000, got 3"),
        ({"exchanges": [{"strategy": "all_gather"}]}, "must each have a strategy, num_bytes of"),
        *(
            ({"exchanges": [row | {name: value}]}, "num_bytes of 1 to 2.63 and seconds of")
            for name, values in (
                ("num_bytes", (0, -1, True, "1", math.inf, 1 << 70, 10**400)),
                ("seconds", (0.0, -1, math.inf, math.nan, None, 1e-320, 10**400)),
            )
            for value in values
        ),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=rf"table of .* {path}: .*{says}.*; write a new one"):
            CostTable.load(path)
    for text in ("", "[]", "3", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"table of exchange costs {path}: .*; write a new"):
            CostTable.load(path)
    missing = r"nothing\.json: No such file or directory; write a new"
    with pytest.raises(ValueError, match=missing) as raised:
        CostTable.load(tmp_path / "nothing.json")
    assert raised.value.__suppress_context__  # a program's traceback shows this sentence alone


def test_an_interrupted_save_leaves_the_table(tmp_path: Path) -> None:
    table = CostTable("gloo", (0, 1), (Measured("all_gather", 1024, 0.25),))
    table.save(tmp_path / "costs.json", {})
    with mock.patch("os.fsync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        CostTable("nccl", (0, 1), ()).save(tmp_path / "costs.json", {})
    assert CostTable.load(tmp_path / "costs.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def choose_by_file(rank: int, world_size: int, path: str) -> None:
    q, kv = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 3, 8)
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_COSTS": path} if rank < 3 else {}):
        different = Communicator(nodes="aabb")
    with pytest.raises(
        ExchangeError, match=r"table of TREE_ATTENTION_COSTS is none on rank 3, \w{12} on r"
    ):
        tree_decode(q, kv, kv, group=different)
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_COSTS": path}):
        comm = Communicator(nodes="aabb")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tree_decode(q, kv, kv, group=comm, explain=True)
        tree_decode(q, kv, kv, group=Communicator(nodes="abcd"), explain=True)
    if rank > 0:
        assert printed.getvalue() == ""
        return
    measured, shipped = printed.getvalue().splitlines()
    assert measured == (
        "exchange of 4 rows of 8 (144 bytes) over 4 ranks, 2 nodes of 2 ranks: hierarchical "
        "(measured on these ranks: hierarchical 1 us, all_gather 2 us); 3 steps, at most "
        f"{72 + 72 + 72} bytes sent per rank; within a node through shared memory; between nodes "
        "through connections of its own"
    )
    assert (
        "all_gather (shipped rule: gloo, 4 or more ranks anywhere, messages up to 32,768" in shipped
    )
    assert shipped.endswith(
        "; no shared memory: every rank is alone on its node; between nodes through connections of "
        "its own"
    )


def lack_a_file(rank: int, world_size: int, path: str) -> None:
    """A rank that has no table comes to its peers, which have failed, and not past them."""
    group = dist.new_group()
    q, kv = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 3, 8)
    if rank == 1:
        with (
            mock.patch.dict(os.environ, {"TREE_ATTENTION_COSTS": path}),
            pytest.raises(ValueError, match=r"nothing\.json: No such file"),
        ):
            tree_decode(q, kv, kv, group=group)
    else:
        with pytest.raises(ExchangeError, match="no word from rank 1"):
            tree_decode(q, kv, kv, group=group, timeout=0.5)
    dist.barrier()
    with pytest.raises(ExchangeError, match="has failed"):
        tree_decode(q, kv, kv, group=group, timeout=20.0)


def test_table_that_one_rank_cannot_read(tmp_path: Path) -> None:
    run_ranks(lack_a_file, 2, str(tmp_path / "nothing.json"), fresh=True)


def test_table_in_a_file_decides(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    rows = Measured("all_gather", 1000, 2e-6), Measured("hierarchical", 1000, 1e-6)
    CostTable("gloo", (0, 0, 1, 1), rows).save(path, {})
    run_ranks(choose_by_file, 4, str(path))


@on_ranks(3)
def test_ranks_agree_on_the_time(rank: int, world_size: int) -> None:
    comm = Communicator()
    with mock.patch.object(time, "perf_counter", lambda: time.monotonic() + 1000.0 * rank):
        clock = Clock.agree(comm.link, CPU, time.monotonic() + 60.0)
        now = clock.now()
    # Hosts of one machine share a monotonic clock, and all ranks read rank 0's.
    assert abs(clock.offset + 1000.0 * rank) < 10.0 and abs(now - time.monotonic()) < 10.0
    assert rank > 0 or clock.offset == 0.0


@on_ranks(2)
def test_ranks_measure_for_the_same_time(rank: int, world_size: int) -> None:
    comm = Communicator()
    with pytest.raises(ExchangeError, match=r"seconds is 0.5 on rank 1, 0.1 on rank 0"):
        calibration.calibrate(comm, CPU, [0.1, 0.5][rank])
    assert comm.failed is None and comm.bytes_sent == 0
