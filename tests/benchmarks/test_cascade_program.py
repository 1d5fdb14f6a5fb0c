# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of pages that sequences have in common, with tiny cases."""

import pytest

from benchmarks import cascade
from tree_attention import lean_decode


@pytest.fixture(autouse=True)
def not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "pin_threads", list)


def test_every_case_is_measured_and_right() -> None:
    report = cascade.measure(cascade.QUICK, 0.0)
    assert report.wrong == [] and len(report.rows) == len(cascade.QUICK)


def test_an_answer_that_lacks_a_key_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_own(q, k, v, page_table):
        return lean_decode(q, k, v, page_table=page_table[:, :-1])

    monkeypatch.setattr(cascade, "cascade_decode", without_own)
    (row,) = cascade.measure(cascade.QUICK[:1], 0.0).rows
    assert row["wrong"]
