# SPDX-License-Identifier: BSD-3-Clause
"""The protocol of Tree Attention's tables on a tiny model: all methods make the same tokens."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import Ranks
from benchmarks.harness.report import write
from distributed import RankFailure, preload, run_ranks
from hf_models import make_model
from lab.papers import protocol
from lab.papers.protocol import METHODS, OURS, PUBLISHED_RING, PUBLISHED_TREE

preload("transformers.generation.utils", "transformers.models.llama.modeling_llama")

CONTEXT, TRIALS, TOKENS = 40, 2, 3


def measured(rank: int, world_size: int) -> list[dict[str, Any]]:
    with torch.inference_mode():
        model = make_model("llama")
        return protocol.measure(model, [CONTEXT], TRIALS, TOKENS, Ranks())


def test_all_methods_make_the_same_tokens(tmp_path: Path) -> None:
    rows, others = run_ranks(measured, 2)
    assert rows == others and [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert not row["wrong"] and row["same_tokens"]
        assert row["total"][0] > row["prefill"][0] > 0 and row["ours"] > 0
    table = protocol.table_of("1B", 2)
    assert table is protocol.TABLES["tree_table_2"]
    rows = [{**row, "context": 8_000} for row in rows]
    report = protocol.report_of(rows, "title", table, layers=2)
    write(report, tmp_path)
    lines = (tmp_path / "tree_protocol.md").read_text().splitlines()
    published = {method: line for method in METHODS for line in lines if f": {method} |" in line}
    assert "| 0.34 ± 0.05 |" in published[PUBLISHED_TREE]
    assert "| 1.38 ± 0.07 |" in published[PUBLISHED_RING]
    assert "| - | 1.00 |" in published[OURS] and "| 0.00 | yes |" in published[OURS]


def of_a_checkpoint(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    with torch.inference_mode():
        model, text = protocol.trained(folder)
        assert text.shape[1] > CONTEXT and model.config.num_hidden_layers > 1
        return protocol.measure(model, [CONTEXT], 2, TOKENS, Ranks(), text)


def test_a_trained_model_writes_the_same_text_by_all_methods() -> None:
    """Also by sums, which round otherwise: the checkpoint is sure enough of its words."""
    folder = Path(__file__).parents[3] / "examples/passkey-llama"
    rows, others = run_ranks(of_a_checkpoint, 2, folder)
    assert rows == others and [row["method"] for row in rows] == list(METHODS)
    assert all(row["same_tokens"] and not row["wrong"] for row in rows)
    other = [{**row, "same_tokens": False, "wrong": True} for row in rows[:1]] + rows[1:]
    assert protocol.report_of(other, "title", None, 2, "tree_protocol_x").wrong


def other_tokens(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Measures with a method whose result is right on rank 0 alone."""

    def wrong(q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        o, lse = protocol.ring_decode(q, *rest, **options)
        return o - 9.0 * rank * q, lse

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setitem(METHODS, "ring of key heads", wrong)
        return protocol.measure(make_model("llama"), [CONTEXT], 1, TOKENS, Ranks())


def test_ranks_that_differ_are_found() -> None:
    """The ranks' next queries differ."""
    with pytest.raises(RankFailure, match="the queries of rank 1 are not those of rank 0"):
        run_ranks(other_tokens, 2)


def test_mean_and_standard_error() -> None:
    assert protocol.mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(3**-0.5))
    mean, error = protocol.mean_and_error([4.0])
    assert mean == 4.0 and isnan(error)


def test_tables_of_worlds() -> None:
    names = {
        (shape, size): protocol.table_of(shape, size)
        for shape in ("1B", "8B")
        for size in (2, 4, 8)
    }
    assert [key for key, table in names.items() if table] == [("1B", 2), ("8B", 4), ("8B", 8)]
