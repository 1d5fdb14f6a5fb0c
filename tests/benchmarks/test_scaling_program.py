# SPDX-License-Identifier: BSD-3-Clause
"""scaling.py: rows beside one process with one thread, and which of them are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.harness.report import write


def measured_rank(tokens: list[int], error: float = 0.0, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "prefill_seconds": 10 * seconds,
        "prefill_bytes": 5,
        "gaps": [seconds] * (len(tokens) - 1),
        "bytes": 7,
        "waiting": 0.25,
        "weights_bytes": 1 << 20,
        "kv_bytes": 1 << 20,
        "tokens": tokens,
        "logits": [1.0 + error, -0.5],
    }


def judged(split_ranks: list[dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """The row of split weights, beside one process."""
    one = scaling.forms(1)
    results = [[measured_rank([3])], *([measured_rank([3, 4, 5], 0.01)] for _ in one[1:])]
    parts = {
        "bare/1": scaling.rows_of("bare", 1, one, results),
        "lan/2": scaling.rows_of("lan", 2, [scaling.form("split")], [split_ranks]),
    }
    model = {"layers": 4, "prompt": 100, "chunk": 50, "tokens": 2, "shape": None}
    rest = {"model": model, "links": [], "other_load": None}
    report = scaling.report_of({name: {"rows": rows, **rest} for name, rows in parts.items()})
    write(report, tmp_path)
    assert "weights split, tensor_parallel_size 1" in (tmp_path / "scaling.md").read_text()
    return report.rows[-1]


def test_verdicts(tmp_path: Path) -> None:
    quick = measured_rank([3, 4, 6], 0.02, 0.75)
    row = judged([quick, measured_rank([3, 4, 6], 0.02, 0.5)], tmp_path)
    assert not row["wrong"] and row["same_tokens"] == 2
    ideal = 1 / min(scaling.CORES, 2)
    assert row["token_of_ideal"] == row["prefill_of_ideal"] == pytest.approx(ideal / 0.75)
    assert judged([quick, measured_rank([3, 4, 5], 0.02)], tmp_path)["wrong"]
    assert judged([measured_rank([3, 4, 5], 0.05)] * 2, tmp_path)["wrong"]
    assert judged([measured_rank([3, 4, 5], float("nan"))] * 2, tmp_path)["wrong"]
