# SPDX-License-Identifier: BSD-3-Clause
"""`plan`: what it prints and writes, and a sentence for every mistake."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tree_attention.__main__ import main
from tree_attention._numbers import in_digits
from tree_attention.exchange.auto.choose import CostTable, Measured
from tree_attention.planning.arithmetic import ALL_FORMS

MODEL = ("plan", "--model", "llama-3.1-8b")
ARGUMENTS = (*MODEL, "--context", "128k", "--ranks", "8", "--machine", "h200")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*ARGUMENTS, *arguments]) == 0
    return capsys.readouterr().out


def test_plan_prints_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys)
    assert output.startswith(
        "Llama 3.1 8B, cache in bf16, 131,072 tokens, 8 ranks\n"
        "Model: 8.03 billion weights in 16.1 GB.\n"
        "Cache: 131,072 bytes a token in 32 layers.\n"
        "Rank: 141 GB"
    )
    for form in ALL_FORMS:
        (line,) = (
            x for x in output.splitlines() if x.strip().startswith((f"{form}  ", f"{form} * "))
        )
        assert len(line.rsplit(maxsplit=7)) == 8 and "…" not in line
    assert "splitting the cache makes a token faster than data parallel from" in output


def test_options_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, "--kv-dtype", "int8", "--sequences", "4", "--link", "100gbe")
    assert "cache in int8, 4 sequences of 131,072 tokens" in output
    assert "12.5 GB/s, 50 us a round" in output


def test_plan_of_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, "--model", str(checkpoint))
    assert output.startswith(f"{checkpoint.name}, cache in bf16")


def test_link_from_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Measured("all_gather", 1000, 2e-3), Measured("all_gather", 2000, 3e-3)
    CostTable("gloo", (0, 1), rows).save(tmp_path / "costs.json", {})
    output = printed(capsys, "--calibration", str(tmp_path / "costs.json"))
    assert "Link: 0.001 GB/s, 1e+03 us a round (fitted to costs.json, measured over gl" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "0"], "--ranks must be 1 to 16,384, got 0"),
        (["--ranks", "20000"], "--ranks must be 1 to 16,384, got 20,000"),
        (["--sequences", "-1"], "--sequences must be 1 to 16,384, got -1"),
        (["--model", "llama-9"], "--model: llama-9 is no directory with config.json, and the"),
        (
            ["--calibration", "/proc/no/costs"],
            "--calibration: table of exchange costs /proc/no/costs: No",
        ),
    ],
)
def test_plan_says_what_to_put_right(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"plan: {sentence}") and output.out == ""


def test_numbers_are_short() -> None:
    assert [in_digits(x) for x in (12345.6, 99.94, 0.01234)] == ["12,346", "99.9", "0.0123"]


def test_choices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), mock.patch.dict("os.environ", {"COLUMNS": "200"}):
        main([*ARGUMENTS, "--gpu", "h300"])
    assert "'h300' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("meta-llama/Llama-3.1-8B", "; did you mean llama-3.1-8b?"),
        ("llama-3.1-70", "; did you mean llama-3.1-70b?"),
        ("gpt-2", ""),
    ],
)
def test_a_name_that_is_nearly_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--context=1k", "--ranks=1", "--machine=cpu"
    assert main(["plan", f"--model={typed}", *options]) == 2
    assert capsys.readouterr().err.endswith(f"llama-3.1-405b{meant}\n")
