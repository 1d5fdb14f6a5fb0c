# SPDX-License-Identifier: BSD-3-Clause
"""tree.py: bytes of every strategy, the choice that is told, and wrong ranks."""

import os
from pathlib import Path

import pytest
from rich.progress import Progress
from torch import Tensor

from benchmarks import tree
from benchmarks.harness import measure, ranks, report
from benchmarks.harness.shapes import DTYPES
from distributed import run_ranks
from tree_attention import BlockCyclic, ring_decode
from tree_attention._environment import COSTS_VARIABLE
from tree_attention.baselines import MANIFEST_BYTES
from tree_attention.exchange import Communicator
from tree_attention.exchange.auto.choose import CostTable, Measured
from tree_attention.exchange.strategies import STRATEGIES, Topology

TIMES = {"all_gather": 2e-3, "two_phase": 1e-3}  # seconds of 1 KiB


def predicted_bytes(case: tree.ShardedCase, method: str, comm: Communicator) -> int:
    """Return the bytes that the rank which sends most sends per call.

    Every strategy by its `traffic`; the ring passes on every shard but the next rank's.
    """
    if method == tree.RING:
        # The smallest.
        next_shard = BlockCyclic(comm.world_size).count(comm.world_size - 1, case.length)
        return case.kv_bytes(case.length - next_shard)
    if comm.world_size == 1:
        return 0
    name = ranks.choice_of(comm, case.state_layout).strategy if method == tree.AUTO else method
    traffic = STRATEGIES[name].traffic(case.state_layout, comm.topology, DTYPES[case.dtype], False)
    return traffic.bytes_sent


def tree_report(rank: int, world_size: int) -> report.Report:
    measure.last_level_cache_bytes = lambda: 1 << 16  # in a process of its own
    tree.pin_threads = lambda first: []
    with Progress(disable=True) as progress:
        result = tree.run(tree.quick_cases(), progress, seconds=0.0, local_rank=rank)
    comm = Communicator()
    ranks.available_strategies(comm)
    for row, case in zip(result.rows, tree.quick_cases(), strict=True):
        methods = row["bytes_per_rank"]
        row["predicted_bytes"] = {name: predicted_bytes(case, name, comm) for name in methods}
    return result


@pytest.mark.parametrize("world_size", [2, 3])
def test_tree_report_counts_the_bytes_of_its_formulas(world_size: int, tmp_path: Path) -> None:
    reports = run_ranks(tree_report, world_size, fresh=True)
    rows = reports[0].rows
    for other in reports[1:]:
        assert [row["times"] for row in other.rows] == [row["times"] for row in rows]
    assert not reports[0].wrong
    for row in rows:
        assert all(row["ranks_agree"].values())
        manifests = MANIFEST_BYTES * (world_size - 1)
        assert {"all_gather", "three_allreduce", tree.AUTO, tree.RING} <= set(row["bytes_per_rank"])
        for method, count in row["bytes_per_rank"].items():
            predicted = row["predicted_bytes"][method] + (manifests if method == tree.RING else 0)
            assert abs(count - predicted) <= 2, method  # an all-reduce may not divide evenly
    report.write(reports[0], tmp_path)
    where, *choices = reports[0].summary
    assert where.startswith(f"1 node of {world_size} ranks: ranks 0 to {world_size - 1} on ")
    assert "a byte from rank 0 and back: to ranks in its node" in where
    assert len(choices) == len(rows)
    for row, choice in zip(rows, choices, strict=True):
        assert choice.startswith(f"{row['name']}: auto takes ")


def test_hosts_and_links_are_told_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.hosts_of(["a", "a", "b", "c", "c"]) == "ranks 0 to 1 on a, 2 on b, 3 to 4 on c"
    assert ranks.hosts_of(["a"]) == "rank 0 on a"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    far = ranks.links_of(Topology.of("abc"), [0.002, 0.004], "gloo")
    assert far == (
        "gloo over the device gloo found; a byte from rank 0 and back: "
        "to ranks in other nodes 3.00 ms (2.00 to 4.00)"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "net0")
    both = ranks.links_of(Topology.of("aab"), [0.001, 0.002], "gloo")
    assert both.startswith("gloo over device net0 (GLOO_SOCKET_IFNAME); ")
    assert "in its node 1.00 ms (1.00 to 1.00), to ranks in other nodes 2.00 ms" in both


def choice(rank: int, world_size: int, costs: str | None) -> str:
    os.environ.pop(COSTS_VARIABLE, None)  # of this process, which ends with the call
    if costs is not None:
        os.environ[COSTS_VARIABLE] = costs
    comm = Communicator(nodes="abc"[:world_size])
    ranks.available_strategies(comm)
    return tree.told_choice(tree.ShardedCase(10), comm)


def test_the_choice_is_told_with_its_reason(tmp_path: Path) -> None:
    (text,) = set(run_ranks(choice, 3, None, fresh=True))
    begin = "auto takes all_gather for 16,512 bytes over 3 nodes of 1 rank: "
    assert text.startswith(f"{begin}shipped rule: gloo, ")
    costs = CostTable("gloo", (0, 1, 2), tuple(Measured(n, 1024, t) for n, t in TIMES.items()))
    costs.save(tmp_path / "costs.json", {})
    (text,) = set(run_ranks(choice, 3, str(tmp_path / "costs.json"), fresh=True))
    assert text.startswith("auto takes two_phase for 16,512 bytes")
    assert "measured on these ranks: two_phase 16,125 us, all_gather 32,250 us" in text


def tree_with_a_wrong_rank(rank: int, world_size: int) -> list[str]:
    measure.last_level_cache_bytes = lambda: 1 << 16
    tree.pin_threads = lambda first: []
    if rank == 1:

        def loses_a_bit(*inputs: Tensor, **options: object) -> tuple[Tensor, Tensor]:
            o, lse = ring_decode(*inputs, **options)
            return o, lse + 1e-6

        tree.ring_decode = loses_a_bit
    with Progress(disable=True) as progress:
        cases = tree.quick_cases()[:1]
        return tree.run(cases, progress, seconds=0.0, local_rank=rank).wrong


def test_tree_report_is_wrong_when_ranks_differ() -> None:
    name = tree.quick_cases()[0].name
    assert run_ranks(tree_with_a_wrong_rank, 2, fresh=True) == [[name], [name]]


def test_tree_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(tree, "pin_threads", lambda first: [])
    with Progress(disable=True) as progress:
        result = tree.run(tree.quick_cases(), progress, seconds=0.0, local_rank=0)
    assert not result.wrong
    assert all(not any(row["bytes_per_rank"].values()) for row in result.rows)
    assert any("torchrun" in warning for warning in result.warnings)
