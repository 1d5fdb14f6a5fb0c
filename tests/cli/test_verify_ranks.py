# SPDX-License-Identifier: BSD-3-Clause
"""What ranks tell each other in `verify`: text, and never anything that is run when it arrives."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tree_attention
from distributed import on_ranks
from tree_attention.cli.verification import Check, in_all_ranks, same_on_all_ranks
from tree_attention.cli.world import World


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_checks_of_ranks(rank: int, world_size: int) -> None:
    world = World(rank, world_size)
    pickled = AssertionError("nothing that is received is unpickled")
    with mock.patch.object(dist.distributed_c10d, "_tensor_to_object", side_effect=pickled):
        detail = "grün" + "x" * 1000 * rank
        check = Check("name", rank != 1, detail)
        rank_1 = "rank 1: grün" + "x" * 1000
        assert in_all_ranks([check], world) == [Check("name", False, rank_1)]
        right = Check("name", None if rank else True, f"detail {rank}")
        assert in_all_ranks([right], world) == [right]
        assert same_on_all_ranks(torch.ones(3))
        assert not same_on_all_ranks(torch.full((3,), float(rank == 1)))


def test_package_reads_no_pickles() -> None:
    root = Path(tree_attention.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\bpickle\b|(?<!_json)_object(_list)?\(|torch\.load\(", line)
    ]
    assert found == []
