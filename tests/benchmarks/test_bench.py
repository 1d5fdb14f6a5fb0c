# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks: what is timed, what is counted, and that a wrong result cannot pass."""

import json
import math
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from torch import Tensor

from distributed import run_ranks
from tree_attention import lean_decode, ring_decode
from tree_attention.bench import decode, links, measure, report, tree
from tree_attention.bench.accuracy import check_against_float64
from tree_attention.cli import bench as bench_command
from tree_attention.cli.world import World
from tree_attention.exchange import Communicator, Topology
from tree_attention.exchange.costs import COSTS_VARIABLE, Costs
from tree_attention.baselines.ring import MANIFEST_BYTES


def test_samples_percentiles() -> None:
    samples = measure.Samples([float(i) for i in range(100, 0, -1)])
    assert samples.median == 50.5
    assert [samples.percentile(p) for p in (0, 1, 10, 99, 100)] == [1, 1, 10, 99, 100]
    assert measure.Samples([2.0]).percentile(99) == 2.0


def test_runs_alternate_and_rotate_over_the_sets() -> None:
    calls: list[tuple[str, int]] = []
    functions = {name: lambda i, name=name: calls.append((name, i)) or name for name in "ab"}
    samples = measure.time_alternating(functions, num_sets=3, seconds=0.0)
    timed = calls[2:]  # one untimed round comes first
    assert [name for name, _ in timed] == ["a", "b"] * measure.MIN_ROUNDS
    assert [i for _, i in timed] == [(n + 1) % 3 for n in range(2 * measure.MIN_ROUNDS)]
    assert len(samples["b"].seconds) == measure.MIN_ROUNDS
    assert samples["b"].result == "b"


def test_disturbed_runs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = 0.0
    calls = 0

    def work(index: int) -> None:
        nonlocal waited, calls
        calls += 1
        if calls % 3 == 0:
            waited += 0.01
            time.sleep(0.01)

    monkeypatch.setattr(measure, "waiting_seconds", lambda: waited)
    samples = measure.time_alternating({"work": work}, num_sets=1, seconds=0.2)["work"]
    assert samples.disturbed > 0 and samples.percentile(100) < 0.01
    assert len(samples.seconds) + samples.disturbed == calls - 1
    assert samples.to_json()["disturbed"] == samples.disturbed


def test_runs_that_are_all_disturbed_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = iter(range(10000))
    monkeypatch.setattr(measure, "waiting_seconds", lambda: next(waiting))
    samples = measure.time_alternating({"a": lambda i: None}, num_sets=1, seconds=0.0)["a"]
    assert samples.disturbed == 0 and len(samples.seconds) == measure.MIN_ROUNDS


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux only")
def test_waiting_for_a_core_is_noticed() -> None:
    """Two threads that compute on one core wait for each other half of the time."""
    allowed = os.sched_getaffinity(0)
    one = min(allowed)

    def compute() -> None:
        os.sched_setaffinity(0, {one})
        x = torch.ones(1 << 16)
        stop = time.perf_counter() + 0.2
        while time.perf_counter() < stop:
            x.sum()  # without the interpreter's lock

    before = measure.waiting_seconds()
    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    assert measure.waiting_seconds() - before > 0.02
    for thread in threads:
        thread.join()


def test_calls_in_step_are_counted_not_timed() -> None:
    calls: list[int] = []
    samples = measure.time_in_step({"a": calls.append}, num_sets=2, rounds=5)["a"]
    assert calls == [0, 1, 0, 1, 0, 1] and len(samples.seconds) == 5


def test_warm_runs_repeat_the_set_untimed() -> None:
    calls: list[int] = []
    measure.time_alternating({"a": calls.append}, num_sets=1, seconds=0.0, warm=True)
    assert len(calls) == 1 + 2 * measure.MIN_ROUNDS


def test_time_is_what_the_call_took() -> None:
    functions = {"sleep": lambda i: time.sleep(0.01), "nothing": lambda i: None}
    samples = measure.time_alternating(functions, num_sets=1, seconds=0.0)
    assert 0.01 <= samples["sleep"].median < 0.1
    assert samples["nothing"].median < 0.005


def test_arena_views_are_disjoint() -> None:
    arena = measure.Arena(1 << 16)
    views = [arena.view(i, (2, 3, 5), torch.bfloat16) for i in range(4)]
    for i, view in enumerate(views):
        view.fill_(i)
    assert [view.float().unique().tolist() for view in views] == [[0], [1], [2], [3]]


def test_sets_exceed_the_last_level_cache() -> None:
    cache = measure.last_level_cache_bytes()
    assert measure.Arena.num_sets(1) >= 2 * cache
    assert measure.Arena.num_sets(100 * cache) == 2


def test_probes_give_plausible_ceilings() -> None:
    # Any machine that runs this does more than 100 MFLOP/s and less than 100 TFLOP/s.
    assert 1e8 < measure.fma_peak() < 1e14
    data = torch.zeros(1 << 24, dtype=torch.uint8)
    begin = time.perf_counter()
    measure.read_memory(data)
    assert 1e8 < data.numel() / (time.perf_counter() - begin) < 1e13


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no thread affinity")
def test_pinned_threads_are_where_they_are_said_to_be() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        cpus = measure.pin_threads()
        assert len(cpus) == torch.get_num_threads()
        assert os.sched_getaffinity(0) == {cpus[0]}
        assert measure.pin_threads(first=len(allowed)) == []  # no CPU left
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), allowed)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_peak_memory_sees_what_is_freed_again() -> None:
    peak = measure.peak_memory_of(lambda: torch.ones(1 << 24).sum().item())
    assert peak is not None and 60 << 20 < peak < 200 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux only")
def test_memory_field_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="/proc/self/status has no field VmNothing"):
        measure._status_bytes("VmNothing")


def test_load_is_warned_about_only_when_it_matters() -> None:
    assert measure.load_warnings([None, 0.0, 0.01]) == []
    (warning,) = measure.load_warnings([0.25, None])
    assert "other processes took up to 25 % of the CPU time" in warning


@pytest.mark.parametrize("wrong", ["value", "nan", "lse", "none"])
def test_wrong_results_are_wrong(wrong: str) -> None:
    q, k, v = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 50, 32), torch.randn(2, 2, 50, 32)
    o, lse = lean_decode(q, k, v)
    if wrong == "value":
        o[1, 2, 1, 7] += 1e-3
    if wrong == "nan":
        o[1, 3, 2, 31] = math.nan
    if wrong == "lse":
        lse[0, 1, 1] += 1e-3
    assert check_against_float64(q, k, v, None, o, lse).right == (wrong == "none")
    # The altered elements belong to queries 1 and 2.
    assert check_against_float64(q, k, v, None, o, lse, queries=[0]).right


def test_case_counts_bytes_and_operations() -> None:
    case = decode.Case(heads=(4, 2), head_dim=8, lengths=(3, 5), seqlen_q=2)
    kv = (3 + 5) * 2 * 8 * 2
    rows = 2 * 4 * 2
    assert case.io_bytes == 2 * (kv + 2 * rows * 8)
    visible = (2 + 3) + (4 + 5)
    assert case.operations == 2 * 2 * 8 * 4 * visible


@pytest.mark.parametrize(
    "case",
    [
        decode.Case("fp32", (4, 2), 32, (70,)),
        decode.Case("fp32", (4, 2), 32, (70, 70), seqlen_q=5),
        decode.Case("fp32", (4, 1), 32, (1, 40, 70)),
        decode.Case("fp32", (2, 2), 32, (64,), seqlen_q=64),
    ],
    ids=lambda case: case.name,
)
def test_sdpa_is_given_the_same_problem(case: decode.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline with another mask would be another problem, and perhaps a quicker one."""
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 10)
    set_bytes = decode.kv_set_bytes(case)
    arena = measure.Arena(set_bytes * measure.Arena.num_sets(set_bytes))
    inputs = decode.Inputs(case, arena)
    o, _ = lean_decode(inputs.q, *inputs.sets[-1], inputs.key_ranges)
    assert o.isfinite().all()
    torch.testing.assert_close(decode.sdpa(case, inputs)(0), o, rtol=1e-4, atol=1e-5)


def test_probe_reads_what_is_visible() -> None:
    case = decode.Case("fp32", (4, 2), 8, (3, 9))
    k, v = torch.zeros(2, *case.kv_shape).unbind()
    k[0, :, 3:] = v[0, :, 3:] = 1
    pieces = decode.visible(case, k, v)
    assert all(x.is_contiguous() and not x.any() for x in pieces)
    assert sum(x.numel() for x in pieces) == 2 * 2 * (3 + 9) * 8


def test_sdpa_refuses_ragged_lengths_of_several_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 10)
    case = decode.Case("fp32", (2, 1), 32, (3, 9), seqlen_q=2)
    inputs = decode.Inputs(case, measure.Arena(1 << 20))
    with pytest.raises(ValueError, match="ragged lengths are compared with one query only"):
        decode.sdpa(case, inputs)


@pytest.mark.parametrize("cases", [decode.quick_cases, decode.standard_cases, decode.full_cases])
def test_case_names_are_unique(cases) -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


def run_quick(monkeypatch: pytest.MonkeyPatch) -> report.Report:
    # Without this the inputs rotate over more memory than a test should take.
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(decode, "pin_threads", lambda first: [])
    with Progress(disable=True) as progress:
        return decode.run(decode.quick_cases(), seconds=0.0, progress=progress)


def test_decode_report_is_right_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_quick(monkeypatch)
    assert not result.wrong
    paths = report.write(result, tmp_path)
    assert [path.name for path in paths] == ["decode.json", "decode.md", "decode.png"]
    content = json.loads(paths[0].read_text())
    assert {"commit", "torch", "cpu", "threads", "command"} <= set(content["environment"])
    assert len(content["rows"]) == len(decode.quick_cases())
    for row, case in zip(content["rows"], decode.quick_cases(), strict=True):
        assert row["name"] == case.name
        assert row["times"]["lean_decode"]["p10_us"] <= row["times"]["lean_decode"]["median_us"]
        assert row["name"] in paths[1].read_text()
    assert paths[2].read_bytes()[:4] == b"\x89PNG"
    assert any("pinned" in warning for warning in content["warnings"])


def test_bench_decode_with_a_wrong_operator_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_one_key(q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None):
        return lean_decode(q, k[:, :, 1:], v[:, :, 1:], key_ranges)

    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(decode, "pin_threads", lambda first: [])
    monkeypatch.setattr(decode, "lean_decode", off_by_one_key)
    assert bench_command.main(["decode", "--quick", "--only", "fp32"]) == 1
    output = capsys.readouterr().out
    assert "WRONG results: fp32 4/2 d64 B=1 1024 q=3" in output


def test_bench_only_lists_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_command.main(["decode", "--quick", "--only", "int8"]) == 2
    output = capsys.readouterr().out
    assert "No case contains 'int8'" in output
    assert decode.quick_cases()[0].name in output


def test_bench_decode_refuses_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_command, "joined_world", lambda: nullcontext(World(size=2)))
    assert bench_command.main(["decode", "--quick"]) == 2
    assert "bench decode runs in one process" in capsys.readouterr().out


def tree_report(rank: int, world_size: int) -> report.Report:
    measure.last_level_cache_bytes = lambda: 1 << 16  # in a process of its own
    tree.pin_threads = lambda first: []
    with Progress(disable=True) as progress:
        return tree.run(tree.quick_cases(), seconds=0.0, progress=progress, local_rank=rank)


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
        assert {"all_gather", "max_then_sum", tree.AUTO, tree.RING} <= set(row["bytes_per_rank"])
        for way, count in row["bytes_per_rank"].items():
            predicted = row["predicted_bytes"][way] + (manifests if way == tree.RING else 0)
            assert abs(count - predicted) <= 2, way  # an all-reduce may not divide evenly
    report.write(reports[0], tmp_path)
    assert (tmp_path / f"tree_{world_size}.png").exists()
    where, *choices = reports[0].summary
    assert where.startswith(f"1 node of {world_size} ranks: ranks 0 to {world_size - 1} on ")
    assert "a byte from rank 0 and back: to ranks in its node" in where
    assert len(choices) == len(rows)
    for row, choice in zip(rows, choices, strict=True):
        assert choice.startswith(f"{row['name']}: auto takes ")


def test_hosts_and_links_are_told_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert links.hosts_of(["a", "a", "b", "c", "c"]) == "ranks 0 to 1 on a, 2 on b, 3 to 4 on c"
    assert links.hosts_of(["a"]) == "rank 0 on a"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    far = links.links_of(Topology.of("abc"), [0.002, 0.004], "gloo")
    assert far == (
        "gloo over the device gloo found; a byte from rank 0 and back: "
        "to ranks in other nodes 3.00 ms (2.00 to 4.00)"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "net0")
    both = links.links_of(Topology.of("aab"), [0.001, 0.002], "gloo")
    assert both.startswith("gloo over device net0 (GLOO_SOCKET_IFNAME); ")
    assert "in its node 1.00 ms (1.00 to 1.00), to ranks in other nodes 2.00 ms" in both


def choice(rank: int, world_size: int, costs: Costs | None) -> str:
    comm = Communicator(nodes="abc"[:world_size], costs=costs)
    links.available_strategies(comm)
    return links.choice_of(comm, tree.exchanged(tree.Case(10), comm.topology))


def test_the_choice_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COSTS_VARIABLE, raising=False)
    costs = Costs(
        *[0.0] * 5, steps_between=1e-3, bytes_between=0.0, local_operations=0, local_bytes=0
    )
    texts = run_ranks(choice, 3, costs)
    assert len(set(texts)) == 1
    # A question and its answer; two_phase asks for both phases at once.
    assert texts[0].startswith(
        "auto takes all_gather for 16,512 bytes over 3 nodes of 1 rank: predicted us all_gather "
        "2,000, "
    )
    assert ", two_phase 3,000, " in texts[0] and "(constants: shipped ones; " in texts[0]


def overlapped_report(rank: int, world_size: int) -> report.Report:
    measure.last_level_cache_bytes = lambda: 1 << 16
    tree.pin_threads = lambda first: []
    cases = [tree.Case(64, batch=16)]
    with Progress(disable=True) as progress:
        return tree.run(cases, seconds=0.0, progress=progress, local_rank=rank)


def test_large_batches_are_also_exchanged_in_parts() -> None:
    result = run_ranks(overlapped_report, 2, fresh=True)[0]
    (row,) = result.rows
    assert set(tree.OVERLAP) < set(row["times"]) and not result.wrong
    for way in tree.OVERLAP:
        assert row["bytes_per_rank"][way] == row["bytes_per_rank"]["auto"]
        assert way not in row["predicted_bytes"]
    assert f"{row['name']}: exchanging parts while others compute is " in result.summary[-1]


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
        return tree.run(cases, seconds=0.0, progress=progress, local_rank=rank).wrong


def test_tree_report_is_wrong_when_ranks_differ() -> None:
    name = tree.quick_cases()[0].name
    assert run_ranks(tree_with_a_wrong_rank, 2, fresh=True) == [[name], [name]]


def test_tree_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(tree, "pin_threads", lambda first: [])
    with Progress(disable=True) as progress:
        result = tree.run(tree.quick_cases(), seconds=0.0, progress=progress, local_rank=0)
    assert not result.wrong
    assert all(not any(row["bytes_per_rank"].values()) for row in result.rows)
    assert any("torchrun" in warning for warning in result.warnings)
