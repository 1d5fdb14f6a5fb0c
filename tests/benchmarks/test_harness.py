# SPDX-License-Identifier: BSD-3-Clause
"""The harness of the benchmarks: what is timed, probed and counted."""

import importlib.machinery
import json
import os
import sys
import threading
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import LAUNCHER, measure, report
from faults import AMPLE
from tree_attention import _C


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


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the harness on, which stands otherwise."""
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now))
    return advance


def test_disturbed_runs_are_left_out(
    advance: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = 0.0
    calls = 0

    def work(index: int) -> None:
        nonlocal waited, calls
        calls += 1
        advance(0.001)
        if calls % 3 == 0:
            waited += 0.01
            advance(0.01)

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
    one = min(os.sched_getaffinity(0))
    ended = threading.Event()

    def compute() -> None:
        os.sched_setaffinity(0, {one})
        x = torch.ones(1 << 16)
        while not ended.is_set():
            x.sum()  # without the interpreter's lock

    before, give_up = measure.waiting_seconds(), time.monotonic() + AMPLE
    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while measure.waiting_seconds() - before < 0.1:
            assert time.monotonic() < give_up, "no wait is noticed"
            time.sleep(0.02)
    finally:
        ended.set()
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


def test_time_is_what_the_call_took(advance: Callable[[float], None]) -> None:
    functions = {"work": lambda i: advance(0.01), "nothing": lambda i: None}
    samples = measure.time_alternating(functions, num_sets=1, seconds=0.0)
    assert samples["work"].median == pytest.approx(0.01)
    assert samples["nothing"].median == 0.0


def test_arena_views_are_disjoint() -> None:
    arena = measure.InputArena(1 << 16)
    views = [arena.view(i, (2, 3, 5), torch.bfloat16) for i in range(4)]
    for i, view in enumerate(views):
        view.fill_(i)
    assert [view.float().unique().tolist() for view in views] == [[0], [1], [2], [3]]


def test_sets_exceed_the_last_level_cache() -> None:
    cache = measure.last_level_cache_bytes()
    assert measure.InputArena.num_sets(1) >= 2 * cache
    assert measure.InputArena.num_sets(100 * cache) == 2


def test_probes_give_plausible_ceilings() -> None:
    # Any machine that runs this does more than 100 MFLOP/s and less than 100 TFLOP/s.
    fma_peak, amx_peak = measure.fma_peak(), measure.amx_peak()
    assert 1e8 < fma_peak < 1e14
    if _C.cpu_instruction_set() == "amx":
        assert 2 * fma_peak < amx_peak < 1e15
    else:
        assert amx_peak == 0.0
    data = torch.zeros(1 << 24, dtype=torch.uint8)
    seconds = min(timeit.repeat(lambda: measure.read_memory(data), number=1, repeat=20))
    assert 1e8 < data.numel() / seconds < 1e13


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


def test_json_has_a_line_for_each_row() -> None:
    content = {
        "environment": {"cpu": "a, b", "threads": 2},
        "warnings": [],
        "seconds": 1.5,
        "rows": [{"name": "x", "times": {"ours": [1, 2]}}, {"name": "y"}],
    }
    text = report.json_text(content)
    assert json.loads(text) == content
    lines = text.splitlines()
    assert lines[lines.index('"rows": [') + 1 :] == [
        '{"name": "x", "times": {"ours": [1, 2]}},',
        '{"name": "y"}',
        "]",
        "}",
    ]
    assert '"cpu": "a, b",' in lines and '"warnings": [],' in lines


def test_command_names_no_place_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/run.py", "--out", "/home/me/out", "--only", "a/b"])
    started = sys.modules["__main__"]
    for name, shown in ((None, "run.py"), ("a.b.__main__", "-m a.b"), ("a.b", "-m a.b")):
        spec = None if name is None else importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setattr(started, "__spec__", spec)
        assert report.environment()["command"] == f"python {shown} --out DIR --only a/b"


def test_command_names_what_started_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(report.ROOT / "benchmarks/tree.py"), "--quick"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks = "torchrun --nproc-per-node 2 benchmarks/tree.py --quick"
    assert report.environment()["command"] == ranks
    hosts = "python -m lab.emulation --link 1ms,1gbit --"
    monkeypatch.setenv(LAUNCHER, hosts)
    assert report.environment()["command"] == f"{hosts} {ranks}"
