# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of sparse patterns, with tiny cases."""

import pytest

from benchmarks import sparse
from benchmarks.harness import measure
from tree_attention import lean_decode


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(sparse, "pin_threads", list)


def test_every_pattern_is_measured_and_right() -> None:
    report = sparse.measure(sparse.QUICK, 0.0)
    assert report.wrong == [] and len(report.rows) == len(sparse.PATTERNS)
    assert [row["num_ranges"] for row in report.rows] == [2, 1, 62, 1]


def test_a_pattern_that_is_not_applied_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "lean_decode", lambda q, k, v, ranges=None: lean_decode(q, k, v))
    (row,) = sparse.measure(sparse.QUICK[-1:], 0.0).rows
    assert row["wrong"]
