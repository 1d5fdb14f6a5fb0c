# SPDX-License-Identifier: BSD-3-Clause
"""The share of decoding in a generation: it grows with the new tokens, and is fitted by layers."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.harness.report import write
from lab.papers import shares

CONDITIONS = "float32 on cpu"


def measured(prompt: int, tokens: list[int]) -> list[shares.Row]:
    width = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4}
    with torch.inference_mode():
        model = shares.make_model("1.3b", 1, 256, vocab_size=97, ffn_dim=64, **width)
        times = shares.measure(model, prompt, max(tokens), rounds=1)
    assert model.config._attn_implementation == "sdpa"
    return shares.rows_of("1.3b", 1, prompt, tokens, times, CONDITIONS)


def timed(layers: int, prompt: int, seconds: float, gap: float, shape: str = "1.3b") -> shares.Row:
    """A row of three new tokens: ours took so long, and the other twice as long."""
    times = {shares.OURS: (seconds, [gap] * 2), shares.THEIRS: (2 * seconds, [2 * gap] * 2)}
    (row,) = shares.rows_of(shape, layers, prompt, [3], times, CONDITIONS)
    return row


def test_shares_grow_with_tokens(tmp_path: Path) -> None:
    few, many = measured(128, [2, 20])
    assert 0 < few["ours"] < many["ours"] < 1
    assert few["prefills"] == many["prefills"] and few["prefills"][shares.OURS] > 0
    assert few["totals"][shares.THEIRS] > few["prefills"][shares.THEIRS] > 0
    # Published for one new token for 64 of the prompt, or more.
    assert few["published"] == many["published"] == 0.8
    write(shares.report_of([few, many], CONDITIONS), tmp_path)
    many_name = "1.3b, 1 layers, 128 tokens, 20 new"
    assert f"| {many_name} |" in (tmp_path / "lean_figure_3.md").read_text()
    # Until they are measured again, and not those of another dtype.
    kept = shares.kept_rows(tmp_path, CONDITIONS)
    assert list(kept) == ["1.3b, 1 layers, 128 tokens, 2 new", many_name]
    assert shares.kept_rows(tmp_path, "bfloat16 on cpu") == {}
    assert shares.kept_rows(None, CONDITIONS) == {}


def test_no_share_is_published_for_fewer_tokens() -> None:
    (row,) = measured(192, [2])
    assert row["published"] is None


@pytest.mark.parametrize(("shape", "layers"), [("1.3b", 24), ("6.7b", 32)])
def test_whole_models_take_a_fixed_time_and_one_for_each_layer(shape: str, layers: int) -> None:
    rows = [timed(n, 128, 0.5 + 0.25 * n, 0.1 + 0.01 * n, shape) for n in (8, 2, 4)]
    row = shares.whole_model(rows)
    assert row["name"] == f"{shape}, {layers} layers, 128 tokens, 3 new, fitted"
    for factor, name in enumerate(shares.NAMES, 1):
        first, each = factor * (0.5 + 0.25 * layers), factor * (0.1 + 0.01 * layers)
        assert row["prefills"][name] == pytest.approx(first)
        assert row["each"][name] == pytest.approx(each)
        assert row["totals"][name] == pytest.approx(first + 2 * each)
    assert row["error"] == pytest.approx(0, abs=1e-9)
    assert row["ours"] == pytest.approx(1 - row["prefills"]["ours"] / row["totals"]["ours"])


def test_the_error_is_that_of_the_depth_left_out() -> None:
    """2 and 4 layers say 2.5 s of 8 layers, which took 2 s."""
    rows = [timed(2, 128, 1.0, 1e-9), timed(4, 128, 1.5, 1e-9), timed(8, 128, 2.0, 1e-9)]
    assert shares.whole_model(rows)["error"] == pytest.approx(0.25)
    assert shares.whole_model(rows[:2])["error"] is None


def test_noise_leaves_a_share_of_decoding() -> None:
    """New tokens took less time in the deeper model."""
    row = shares.whole_model([timed(1, 128, 1.0, 1.0), timed(3, 128, 2.0, 0.1)])
    assert 0 < row["ours"] < 1 and row["error"] is None


def test_fits_are_of_depths_of_the_same_shape_and_prompt() -> None:
    rows = [timed(n, prompt, n * prompt, 1.0) for prompt in (64, 128) for n in (1, 2)]
    alone = [timed(1, 256, 1.0, 1.0), timed(2, 128, 1.0, 1.0, "6.7b")]
    found = [row["name"] for row in shares.with_fits([*alone, *rows])]
    derived = [
        "1.3b, 24 layers, 64 tokens, 3 new, fitted",
        "1.3b, 24 layers, 128 tokens, 3 new, fitted",
        "1.3b, 24 layers, 50000 tokens, 1000 new, extrapolated",
    ]
    given = {row["name"] for row in [*alone, *rows]}
    assert [name for name in found if name not in given] == derived
    assert given < set(found) and len(found) == len(given) + 3
    # The paper has this number for its smaller model only.
    larger = [timed(n, prompt, n * prompt, 1.0, "6.7b") for prompt in (64, 128) for n in (1, 2)]
    speedups = [shares.with_fits(own)[-1]["published_speedup"] for own in (rows, larger)]
    assert speedups == [1.26, None]


def test_extrapolation_follows_the_laws_it_names() -> None:
    def seconds(n: int) -> tuple[float, list[float]]:
        return 2e-3 * n + 3e-7 * n * n, [0.01 + 1e-6 * n] * 5

    rows = []
    for n in (100, 400, 1600):
        times = {shares.OURS: seconds(n), shares.THEIRS: seconds(2 * n)}
        rows += shares.rows_of("1.3b", 24, n, [3, 6], times, CONDITIONS)
    row = shares.extrapolated(rows, 50_000, 1_000)
    assert row["name"] == "1.3b, 24 layers, 50000 tokens, 1000 new, extrapolated"
    ours, theirs = (row["prefills"][name] for name in shares.NAMES)
    assert ours == pytest.approx(2e-3 * 50_000 + 3e-7 * 50_000**2)
    assert theirs == pytest.approx(2e-3 * 100_000 + 3e-7 * 100_000**2)
    assert row["totals"][shares.OURS] - ours == pytest.approx(999 * (0.01 + 0.0505))


def test_extrapolation_is_of_no_negative_time() -> None:
    """Short prompts, of which the longer one took hardly more, as noise has it."""
    rows = [timed(24, n, first, 0.02 - 1e-5 * n) for n, first in ((64, 0.030), (128, 0.031))]
    row = shares.extrapolated(rows, 50_000, 1_000)
    for name in shares.NAMES:
        assert 0 < row["prefills"][name] < row["totals"][name]


@pytest.mark.parametrize(
    ("instruction_set", "kind", "dtype"),
    [
        ("avx2", "cpu", "float32"),
        ("avx512", "cpu", "float32"),
        ("avx512_bf16", "cpu", "bfloat16"),
        ("amx", "cpu", "bfloat16"),
        ("avx2", "cuda", "bfloat16"),
    ],
)
def test_bfloat16_is_for_processors_that_multiply_it(
    instruction_set: str, kind: str, dtype: str
) -> None:
    extension = mock.Mock()
    extension.cpu_instruction_set.return_value = instruction_set
    with mock.patch.object(shares._loader, "load", return_value=extension):
        assert shares.default_dtype(kind) == dtype


def test_program_runs_the_shape_and_depths_that_are_asked_for(tmp_path: Path) -> None:
    small = {"tiny": shares.Shape(6, 64, None)}
    arguments = "--shape tiny --layers 1 2 --prompts 32 --tokens 2 3 --rounds 1 --dtype bfloat16"
    with mock.patch.object(shares, "SHAPES", small):
        assert shares.main([*arguments.split(), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "lean_figure_3.json").read_text())["rows"]
    assert [(row["layers"], row["tokens"]) for row in rows] == [
        *((1, 2), (2, 2), (1, 3), (2, 3)),
        *((6, 2), (6, 3)),
    ]
    assert {row.get("measured") for row in rows} == {"bfloat16 on cpu", None}
