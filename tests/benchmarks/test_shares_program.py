# SPDX-License-Identifier: BSD-3-Clause
"""The share of decoding in a generation: it grows with the new tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.harness.report import write
from benchmarks.papers import shares


def measured(prompt: int, tokens: list[int]) -> list[shares.Row]:
    width = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4}
    with torch.inference_mode():
        model = shares.make_model(1, 256, vocab_size=97, ffn_dim=64, **width)
        rows = shares.measure(model, prompt, tokens, rounds=1)
    assert model.config._attn_implementation == "sdpa"
    return rows


def test_shares_grow_with_tokens(tmp_path: Path) -> None:
    few, many = measured(128, [2, 20])
    assert 0 < few["ours"] < many["ours"] < 1 and few["prefill"] == many["prefill"] > 0
    assert few["totals"][shares.THEIRS] > few["their_prefill"] > 0
    # Published for one new token for 64 of the prompt, or more.
    assert few["published"] == many["published"] == 0.8
    write(shares.report_of([few, many], "title"), tmp_path)
    assert "| 128 tokens, 20 new |" in (tmp_path / "lean_figure_3.md").read_text()


def test_no_share_is_published_for_fewer_tokens() -> None:
    (row,) = measured(192, [2])
    assert row["published"] is None
