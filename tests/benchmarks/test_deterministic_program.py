# SPDX-License-Identifier: BSD-3-Clause
"""The program that measures tree_decode(deterministic=n), with few keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import deterministic
from benchmarks.harness import measure, report
from benchmarks.harness.ranks import Ranks
from distributed import run_ranks
from tree_attention import tree_decode


def measured(rank: int, world_size: int) -> report.Report:
    measure.last_level_cache_bytes = lambda: 1 << 16  # in a process of its own
    ranks = Ranks()
    rows = deterministic.measure(900, (128, 64), 2, ranks)
    return deterministic.report_of(rows, 900, ranks, [])


def test_bits_are_those_of_every_number_of_ranks(tmp_path: Path) -> None:
    bits = []
    for world_size in (1, 2):
        found = run_ranks(measured, world_size, fresh=True)[0]
        assert not found.wrong
        assert [row["name"] for row in found.rows] == [
            "without",
            "in blocks of 128",
            "in blocks of 64",
        ]
        bits.append([row["bits"] for row in found.rows[1:]])
        report.write(found, tmp_path)
    assert bits[0] == bits[1] and bits[0][0] != bits[0][1]


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_half_the_keys(q, k, v, **options):
        return tree_decode(q, k[:, :, :450], v[:, :, :450], **options)

    monkeypatch.setattr(deterministic, "tree_decode", of_half_the_keys)
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 16)
    assert all(row["wrong"] for row in deterministic.measure(900, (64,), 2, Ranks()))
