# SPDX-License-Identifier: BSD-3-Clause
"""A strategy is one file, and everything that lists strategies knows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from package_copy import copy_package
from tree_attention.exchange import StrategyName
from tree_attention.exchange.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]

TOY = '''
"""Every rank sends its state around the ring, one rank further in each step."""

from ...ops import merge_states
from . import Strategy, Traffic


def prepare(context):
    link, state = context.link, context.state
    received, o_parts, lse_parts = state.parts(link.world_size)
    following, previous = (link.rank + 1) % link.world_size, (link.rank - 1) % link.world_size
    rounds = [
        link.messages(
            {previous: received[link.rank - hop - 1]},
            {following: received[link.rank - hop]},
            state.device,
        )
        for hop in range(link.world_size - 1)
    ]

    def exchange(deadline, o, lse):
        received[link.rank].copy_(state.send)
        for one in rounds:
            one.run(deadline)
        merge_states(o_parts, lse_parts, out=(o, lse))

    return exchange


def traffic(layout, topology, out_dtype, head_sharded):
    steps = topology.world_size - 1
    return Traffic(steps, steps * layout.num_bytes)


STRATEGY = Strategy(prepare, traffic)
'''


def test_type_checkers_know_each_strategy() -> None:
    assert set(get_args(StrategyName)) == set(STRATEGIES)


@pytest.mark.deep
def test_a_new_strategy_is_a_file(tmp_path: Path) -> None:
    """In a copy of the package the tests' own parameters, formulas and calibration know it."""
    (copy_package(tmp_path) / "exchange" / "strategies" / "toy.py").write_text(TOY)
    names = (
        "test_merge_over_ranks.py",
        "test_choice.py",
        "test_strategies.py",
        "test_strategy_memory.py",
    )
    # Of the worlds those of 1, 2, 3 and 7 ranks: most of the time is their processes'.
    wanted = "toy and not (toy-4 or toy-5 or toy-6) or test_calibration or nothing_but_outputs"
    wanted += " or (formulas or same_bits_in_every_way) and aaaabbc"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", wanted,
         "-o", f"pythonpath=. {tmp_path} tests", *(f"tests/exchange/{name}" for name in names)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    for test in ("test_merges_states[toy-7]", "test_nan_stays_in_its_row[toy]"):
        assert f"{test} PASSED" in run.stdout
    assert run.stdout.count(" PASSED") >= 10
