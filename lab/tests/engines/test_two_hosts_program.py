# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on two emulated hosts: its commands, and what its report makes of the answers."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from lab.engines import two_hosts
from lab.engines.two_hosts import ARMS

PARSED = argparse.Namespace(context=100, tokens=3)


def row(engine: str, tokens: list[int], seconds: float) -> dict[str, Any]:
    return {
        "link": "1ms,1gbit",
        "engine": engine,
        "first_request_seconds": 1.5,
        "first_token_seconds": 1.0,
        "token_seconds": seconds,
        "stream_seconds": 2 * seconds,
        "peak_resident_bytes": 1 << 30,
        "tokens": tokens,
    }


def test_figures_are_ratios_to_gloo_and_to_one_host() -> None:
    report = two_hosts.report_of(
        [
            row("vllm, one host", [1, 2, 3, 4], 0.03),
            row("vllm, two hosts", [1, 2, 3, 4], 0.04),
            row("ours, two hosts", [1, 2, 9, 4], 0.02),
            row("ours, two hosts, DCP 2", [7, 2, 3, 4], 0.02),
        ]
    )
    columns = {column.heading: column.values for column in report.columns}
    assert columns["between tokens ms"][2] == "20.0 (2.00, 1.50)"
    assert columns["same tokens"] == ["-", "100 %", "50 %", "0 %"]
    assert columns["right"] == ["yes", "yes", "yes", "WRONG"]


def test_an_engine_that_ends_is_named() -> None:
    report = two_hosts.report_of(
        [{"link": "1ms,1gbit", "engine": "ours, two hosts", "reason": "no memory"}]
    )
    assert report.warnings == ["1ms,1gbit, ours, two hosts: no memory"]


def test_commands_of_the_hosts() -> None:
    one = two_hosts.command(ARMS["vllm, one host"], 0, Path("model"), PARSED)
    assert "--nnodes" not in one and one[:4] == ["-m", "tree_attention.vllm", "serve", "model"]
    second = two_hosts.command(ARMS["ours, two hosts, DCP 2"], 1, Path("model"), PARSED)
    text = " ".join(second)
    assert "--nnodes 2 --node-rank 1 --master-addr host0 --headless" in text
    assert "--decode-context-parallel-size 2" in text


def test_the_gap_is_the_median_of_all_streams() -> None:
    streams = [{"seconds": [0.0, 1.0, 2.0]}, {"seconds": [0.0, 3.0]}]
    assert two_hosts.gap(streams) == pytest.approx(1.0)
