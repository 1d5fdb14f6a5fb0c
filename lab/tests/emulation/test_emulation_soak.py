# SPDX-License-Identifier: BSD-3-Clause
"""soak.py: each fault once, and what makes its verdict."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.harness.report import write
from lab.emulation import soak, unsupported
from lab.emulation.soak_job import (
    CUT_LINK,
    KILLED,
    SLOW_LINK,
    STOPPED,
    Fault,
    Outcome,
    Record,
    Sample,
)
from lab.emulation.soak_rank import DEADLINE, is_right

TOO_LONG = DEADLINE + 1.0


def test_each_fault_once(tmp_path: Path) -> None:
    if (why := unsupported()) is not None:
        pytest.skip(why)
    faults = [
        Fault(STOPPED, 1, 0, 0.1, 0.3),
        Fault(SLOW_LINK, 1, 2, 0.1, 0.3, delay=0.02),
        Fault(CUT_LINK, 0, 2, 0.1, 0.0),
        Fault(KILLED, 0, 1, 0.1, 0.0),  # rank 0 serves the store
        Fault(STOPPED, 2, 0, 0.1, TOO_LONG),  # which no rank survives
    ]
    record = soak.soak(600.0, faults, seed=3)
    *survived, stopped = record.outcomes
    assert [outcome.failed for outcome in survived] == [{}] * 4
    assert [len(outcome.raised) for outcome in survived] == [0, 0, 3, 2]
    assert any("error" in said for said in stopped.failed.values()), stopped
    assert record.results > 0 and record.wrong == 0
    assert set(record.memory) == {(job, rank) for job in range(2) for rank in range(3)}
    report = soak.report_of(record, seed=3)
    assert report.wrong == [STOPPED]
    write(report, tmp_path)
    assert "| cut link | 1 | 0 failures; 3 errors after " in (tmp_path / "soak.md").read_text()


def _wrong(record: Record) -> list[str]:
    return soak.report_of(record, seed=0).wrong


def test_what_is_wrong() -> None:
    fault = next(soak.random_faults(0))
    assert _wrong(Record(results=9, outcomes=[Outcome(fault, 1.0)])) == []
    assert _wrong(Record(results=9, wrong=1)) == ["results"]
    assert _wrong(Record()) == ["results"]
    silent = Outcome(fault, 1.0, failed={2: "nothing"})
    assert _wrong(Record(results=9, outcomes=[silent])) == [fault.kind]


def test_growth_is_that_of_warm_processes() -> None:
    def samples(first: int, per_second: int, groups_lost: int = 1) -> list[Sample]:
        begin = int(soak.WARM_UP) + 1
        cold = [Sample(float(second), 10**9, 1) for second in range(begin)]
        return [*cold, *(Sample(begin + s, first + s * per_second, groups_lost) for s in range(60))]

    grows, flat = samples(7 * 10**8, 50_000), samples(6 * 10**8, 0)
    assert soak.growth([grows]) == pytest.approx(3.0)
    assert soak.growth([grows, flat]) == pytest.approx(1.5)
    assert soak.growth([samples(7 * 10**8, 50_000, groups_lost=0), flat[:9]]) == 0
    leaking = Record(results=9, memory={(0, 0): grows})
    assert _wrong(leaking) == ["warm processes"]


def test_only_what_float64_says_is_right() -> None:
    o, lse = torch.randn(1, 4, 1, 8).double(), torch.randn(1, 4, 1).double()
    assert is_right((o.float(), lse.float()), (o, lse))
    for off in (1e-4, math.nan):
        assert not is_right((o.float() + off, lse.float()), (o, lse))
        assert not is_right((o.float(), lse.float() + off), (o, lse))


def test_random_faults_are_repeated_by_their_seed() -> None:
    first, again, other = (soak.random_faults(seed) for seed in (1, 1, 2))
    faults = [next(first) for _ in range(300)]
    assert faults == [next(again) for _ in range(300)] != [next(other) for _ in range(300)]
    assert {fault.kind for fault in faults} == set(soak.WEIGHTS)
    assert all(0 < fault.seconds <= DEADLINE / 2 for fault in faults)
