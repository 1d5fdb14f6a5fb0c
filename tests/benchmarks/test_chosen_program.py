# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of chosen keys, with tiny cases."""

from dataclasses import replace

import pytest
import torch

from benchmarks import chosen
from benchmarks.harness import measure
from distributed import run_ranks
from tree_attention import index_topk, lean_decode


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(measure, "MIN_ROUNDS", 2)
    # Of 128 heads each call of transformers' layer takes seconds without instructions for bfloat16.
    monkeypatch.setattr(chosen, "V32", replace(chosen.V32, num_heads=16))
    monkeypatch.setattr(chosen, "pin_threads", list)
    monkeypatch.setattr(chosen, "fma_peak", lambda: 1e9)


def test_every_case_is_measured_and_right() -> None:
    threads = torch.get_num_threads()
    try:
        report = chosen.measure(256, 0.0, with_ranks=False)
    finally:
        torch.set_num_threads(threads)
    assert report.wrong == [] and len(report.rows) == len(chosen.INDEXES) + 4
    assert all(0 < row["error"] < 1e-2 for row in report.rows)
    assert sum("ceiling" in row for row in report.rows) == len(chosen.INDEXES)


def test_the_longer_time_is_the_ceiling() -> None:
    assert chosen.to_ceiling(6e-3, {"products": 4e-3, "reading": 2e-3}) == "1.50 products"
    assert chosen.to_ceiling(6e-3, {"products": 4e-3, "reading": 5e-3}) == "1.20 reading"


def on_ranks(rank: int, world_size: int) -> list[dict[str, object]]:
    return chosen.on_ranks(chosen.Ranks(), 4096)


def test_merge_and_split_index_are_measured_and_right() -> None:
    for merge, index in run_ranks(on_ranks, 2):
        assert not merge["wrong"] and "all_merge_topk of 2" in merge["name"]
        assert not index["wrong"] and "4,096 keys on 2 ranks" in index["name"]
        assert {"half, the other rank waiting", "one rank"} < index["times"].keys()


def test_a_key_that_is_left_out_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_best(q, k, *others, **options):
        return index_topk(q, k[:, :, :-500], *others, **options)

    monkeypatch.setattr(chosen, "index_topk", without_the_best)
    assert chosen.run_index(chosen.INDEXES[3], 4096, 0.0, 1e9)["wrong"]


def test_other_rows_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_others(q, k, v, ranges=None, **options):
        return lean_decode(q, k.flip(0), v.flip(0), ranges, **options)

    monkeypatch.setattr(chosen, "lean_decode", of_others)
    assert chosen.run_rows(16, 4096, 0.0)["wrong"]
    assert chosen.run_layer(chosen.M3, 4096, 0.0)["wrong"]
