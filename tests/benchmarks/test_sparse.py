# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of sparse patterns, with tiny cases."""

import pytest
import torch

from benchmarks import sparse
from benchmarks.harness import measure
from tree_attention import lean_decode
from tree_attention.patterns import page_lists

ONE_PAGE = torch.tensor([0, 1]).expand(2, 1, 1, 2)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(sparse, "pin_threads", list)


def test_every_pattern_is_measured_and_right() -> None:
    report = sparse.measure(sparse.QUICK, 0.0)
    assert report.wrong == [] and len(report.rows) == len(sparse.ALL_PATTERNS)
    assert [row["num_ranges"] for row in report.rows] == [2, 1, 62, 1]
    listed = list(sparse.PATTERNS_OF_PAGES)
    assert [row["case"]["pattern"] for row in report.rows if "page list" in row["ratios"]] == listed


def test_a_pattern_that_is_not_applied_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ranges(q, k, v, ranges=None, **pages):
        return lean_decode(q, k, v, ranges if pages else None, **pages)

    monkeypatch.setattr(sparse, "lean_decode", without_ranges)
    (row,) = sparse.measure(sparse.QUICK[-1:], 0.0).rows
    assert row["wrong"]


def test_a_list_of_other_pages_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the ranges of the same row are right."""
    monkeypatch.setattr(sparse, "page_lists", lambda _, *others: page_lists(ONE_PAGE, *others))
    (row,) = sparse.measure(sparse.QUICK[-1:], 0.0).rows
    assert row["wrong"]
