# SPDX-License-Identifier: BSD-3-Clause
"""The share of decoding in a generation: it grows with the new tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.harness.report import write
from benchmarks.papers import shares


def measured(prompt: int, tokens: list[int]) -> list[shares.Row]:
    width = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4}
    with torch.inference_mode():
        model = shares.make_model(1, 256, vocab_size=97, ffn_dim=64, **width)
        times = shares.measure(model, prompt, max(tokens), rounds=1)
    assert model.config._attn_implementation == "sdpa"
    return shares.rows_of(1, prompt, tokens, times)


def test_shares_grow_with_tokens(tmp_path: Path) -> None:
    few, many = measured(128, [2, 20])
    assert 0 < few["ours"] < many["ours"] < 1
    assert few["prefills"] == many["prefills"] and few["prefills"][shares.OURS] > 0
    assert few["totals"][shares.THEIRS] > few["prefills"][shares.THEIRS] > 0
    # Published for one new token for 64 of the prompt, or more.
    assert few["published"] == many["published"] == 0.8
    write(shares.report_of([few, many], "title"), tmp_path)
    assert "| 128 tokens, 20 new |" in (tmp_path / "lean_figure_3.md").read_text()
    # Until they are measured again, and not those of another model.
    assert list(shares.kept_rows(tmp_path, 1)) == ["128 tokens, 2 new", "128 tokens, 20 new"]
    assert shares.kept_rows(tmp_path, 2) == shares.kept_rows(None, 1) == {}


def test_no_share_is_published_for_fewer_tokens() -> None:
    (row,) = measured(192, [2])
    assert row["published"] is None


def test_extrapolation_follows_the_laws_it_names() -> None:
    def seconds(n: int) -> tuple[float, list[float]]:
        return 2e-3 * n + 3e-7 * n * n, [0.01 + 1e-6 * n] * 5

    rows = []
    for n in (100, 400, 1600):
        times = {shares.OURS: seconds(n), shares.THEIRS: seconds(2 * n)}
        rows += shares.rows_of(1, n, [3, 6], times)
    row = shares.extrapolated(rows, 50_000, 1_000)
    assert row["name"] == "50000 tokens, 1000 new, extrapolated"
    assert row["published_speedup"] == 1.26
    ours, theirs = (row["prefills"][name] for name in (shares.OURS, shares.THEIRS))
    assert ours == pytest.approx(2e-3 * 50_000 + 3e-7 * 50_000**2)
    assert theirs == pytest.approx(2e-3 * 100_000 + 3e-7 * 100_000**2)
    assert row["totals"][shares.OURS] - ours == pytest.approx(999 * (0.01 + 0.0505))
    assert shares.extrapolated(rows, 50_000, 2_000)["published_speedup"] is None


def test_extrapolation_is_of_no_negative_time() -> None:
    """Short prompts, of which the longer one took hardly more, as noise has it."""
    rows = []
    for n, first in ((64, 0.030), (128, 0.031)):
        times = dict.fromkeys((shares.OURS, shares.THEIRS), (first, [0.02 - 1e-5 * n] * 5))
        rows += shares.rows_of(1, n, [3], times)
    row = shares.extrapolated(rows, 50_000, 1_000)
    for name in (shares.OURS, shares.THEIRS):
        assert 0 < row["prefills"][name] < row["totals"][name]
