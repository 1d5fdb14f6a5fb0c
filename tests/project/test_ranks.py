# SPDX-License-Identifier: BSD-3-Clause
"""Ranks of tests are as different as processes of several hosts are.

The mistake these tests are for: order of a set of strings that reaches a message, or what ranks
compare, unseen as all ranks have one order.
"""

from __future__ import annotations

import pytest

from distributed import run_ranks
from ranks_of_commands import started


def _hash(rank: int, world_size: int) -> int:
    return hash("tree")


@pytest.mark.deep
@pytest.mark.parametrize("fresh", [True, False])
def test_each_has_a_hash_seed_of_its_own(fresh: bool) -> None:
    hashes = run_ranks(_hash, 4, fresh=fresh)
    assert len({hash("tree"), *hashes}) >= len({*hashes}) == 4


def test_each_rank_of_a_command_has_one() -> None:
    with started([], 3, program="print(hash('tree'))") as ranks:
        assert len({ranks.wait_for_end(rank).stdout for rank in range(3)}) == 3
