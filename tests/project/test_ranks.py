# SPDX-License-Identifier: BSD-3-Clause
"""Neighbouring ranks of tests are as different as processes of several hosts are.

The mistake these tests are for: order of a set of strings that reaches a message, or what ranks
compare, unseen as all ranks have one order.
"""

from __future__ import annotations

import pytest

import tree_attention
from distributed import run_ranks
from ranks_of_commands import started


def _package(rank: int, world_size: int) -> str:
    return tree_attention.__file__


def test_they_run_what_this_process_runs() -> None:
    """And not another tree that the environment has installed."""
    assert run_ranks(_package, 2, fresh=True) == [tree_attention.__file__] * 2


def _hash(rank: int, world_size: int) -> int:
    return hash("tree")


@pytest.mark.deep
@pytest.mark.parametrize("fresh", [True, False])
def test_they_have_different_hash_seeds(fresh: bool) -> None:
    hashes = run_ranks(_hash, 3, fresh=fresh)
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.deep
def test_ranks_of_a_command_have_them_too() -> None:
    with started([], 2, program="print(hash('tree'))") as ranks:
        assert len({ranks.wait_for_end(rank).stdout for rank in range(2)}) == 2
