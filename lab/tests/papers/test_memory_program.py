# SPDX-License-Identifier: BSD-3-Clause
"""memory.py: what it counts is what the formulas say."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.ranks import Ranks
from benchmarks.harness.report import write
from distributed import run_ranks
from lab.papers import memory
from lab.papers.memory import METHODS, PUBLISHED, RING, RING_PASS_Q, STRATEGIES

KEYS = 4096
HEADS = (32, 8)
SHARD = KEYS * 4096


def measured(rank: int, world_size: int) -> list[dict[str, Any]]:
    with torch.inference_mode():
        return memory.measure([KEYS], HEADS, Ranks())


def test_formulas_are_what_ranks_allocate(tmp_path: Path) -> None:
    (row,) = run_ranks(measured, 3)[0]
    assert list(row["methods"]) == list(METHODS) and row["keys"] == KEYS
    for name, method in row["methods"].items():
        excess = method["allocated"] - memory.formula(name, 3, memory.problem_of(KEYS, HEADS))
        # Manifests of the ring, and buffers of the tiny call that tests the communicator, of which
        # another thread may free a part only now.
        assert method["right"] and abs(excess) < 10_000, name
    assert row["methods"][RING]["allocated"] // SHARD == 2
    for name in STRATEGIES:
        assert row["methods"][name]["allocated"] < SHARD / 50
    report = memory.report_of([row])
    assert not report.wrong
    methods = report.rows[0]["methods"]
    # Eq. 8: a shard, the query and the output; Eq. 9: numerator, query, denominator and maximum.
    assert methods[RING]["published"] == SHARD + 2 * 2 * 32 * 128
    assert methods[PUBLISHED]["published"] == 2 * 2 * 32 * (128 + 1)
    assert methods["two_phase"]["published"] is None
    write(report, tmp_path)
    assert "| p=3 n=4096 | all_gather |" in (tmp_path / "memory.md").read_text()
    row["methods"][RING_PASS_Q]["right"] = False
    assert memory.report_of([row]).wrong == ["p=3 n=4096"]


def test_contexts_fit_memory() -> None:
    # Two ranks need two shards each, three need three.
    room = 2 * (2 * SHARD + memory.PROCESS_BYTES)
    assert memory.fitting(2, [KEYS, 2 * KEYS], HEADS, room) == [KEYS]
    assert memory.fitting(3, [KEYS], HEADS, room) == []


def test_known_result() -> None:
    o, lse = torch.full((1, 2, 1, 8), 1.5).bfloat16(), torch.full((1, 2, 1), 20.0).log()
    assert memory.is_right(o, lse, 2, 10)
    assert not memory.is_right(o, lse, 2, 11)
    assert not memory.is_right(o * 1.1, lse, 2, 10)
