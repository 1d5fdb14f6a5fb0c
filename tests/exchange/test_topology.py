# SPDX-License-Identifier: BSD-3-Clause
"""Who shares a node, as ranks find out, and which ranks may merge among themselves first."""

from __future__ import annotations

import os
import socket
from unittest import mock

import pytest
import torch.distributed as dist

from distributed import on_ranks
from tree_attention import ExchangeError
from tree_attention.exchange import Communicator, Topology
from tree_attention.exchange.transport.topology import node_name


@pytest.mark.parametrize(
    "nodes,subtree_size",
    [
        ("a", 1),
        ("aaaa", 4),
        ("aaaaaa", 2),  # 6 = 4 + 2: runs of two are subtrees, of three are not
        ("aaaaaaa", 1),
        ("aabb", 2),
        ("aaaabbbb", 4),
        ("aaabbb", 1),
        ("aaaabb", 2),  # nodes of different sizes
        ("aaabbbbb", 1),
        ("aaaaaabbbbbbcccccc", 2),
        ("aabbaabb", 2),  # not all ranks of a node in a row
        ("abab", 1),
        ("abcdefgh", 1),
        ("aaaaaaaabbbbbbbbcccccccc", 8),
    ],
)
def test_subtrees(nodes: str, subtree_size: int) -> None:
    topology = Topology.of(nodes)
    assert topology.world_size == len(nodes) and topology.num_nodes == len(set(nodes))
    assert topology.subtree_size == subtree_size
    # Ranks that merge first are on one node, and their runs tile the world.
    assert len(nodes) % subtree_size == 0
    for begin in range(0, len(nodes), subtree_size):
        assert len(set(nodes[begin : begin + subtree_size])) == 1


def test_equal_whatever_the_names() -> None:
    assert Topology.of("xxyz") == Topology.of([7, 7, "x", None]) == Topology((0, 0, 1, 2))
    assert str(Topology.of("aabb")) == "2 nodes of 2 ranks"
    assert str(Topology.of("abbcc")) == "3 nodes of 1 or 2 ranks"
    assert str(Topology.of("a")) == "1 node of 1 rank"


def name_with(rank: int, environment: dict[str, str]) -> str:
    variables = dict.fromkeys(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TREE_ATTENTION_NODE"), "")
    with (
        mock.patch.dict(os.environ, variables | environment),
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_rank", return_value=rank),
    ):
        return node_name()


def test_names_of_nodes() -> None:
    host = socket.gethostname()
    assert name_with(5, {}) == f"{host}/None"
    # torchrun with two ranks per node; agents of another size are told by their ranks' numbers.
    names = [
        name_with(rank, {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)})
        for rank, (local_rank, local_size) in enumerate([(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])
    ]
    assert names == [f"{host}/0"] * 2 + [f"{host}/2"] * 3
    assert [name_with(rank, {"LOCAL_WORLD_SIZE": "2"}) for rank in (1, 2)] == [
        f"{host}/0",
        f"{host}/2",
    ]
    # Not from torchrun.
    assert name_with(5, {"LOCAL_RANK": "0"}) == f"{host}/None"
    assert name_with(5, {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"}) == f"{host}/4"
    assert name_with(5, {"LOCAL_WORLD_SIZE": "0"}) == f"{host}/None"
    assert name_with(5, {"LOCAL_WORLD_SIZE": "2", "TREE_ATTENTION_NODE": "rack 7"}) == "rack 7"


@on_ranks(4)
def test_ranks_find_their_nodes(rank: int, world_size: int) -> None:
    comm = Communicator()
    comm.agree((("what", 1),))
    assert comm.topology == Topology((0, 0, 0, 0))
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_NODE": f"node {rank // 2}"}):
        comm = Communicator()
    comm.agree((("what", 1),))
    assert comm.topology == Topology((0, 0, 1, 1))
    comm = Communicator(nodes="abbb")
    assert comm.topology == Topology((0, 1, 1, 1))
    comm.agree((("what", 1),))
    assert comm.topology == Topology((0, 1, 1, 1))
    if rank == 1:  # which is not a communicator ahead of the others then
        with pytest.raises(ValueError, match="Communicator: nodes must name the node of "):
            Communicator(nodes=[1])
    comm = Communicator(nodes="abbb" if rank == 2 else "aabb")
    message = r"nodes is \(0, 1, 1, 1\) on rank 2, \(0, 0, 1, 1\) on rank 0"
    with pytest.raises(ExchangeError, match=message):
        comm.agree((("what", 1),))


@on_ranks(4)
def test_subgroups(rank: int, world_size: int) -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [1, 2, 3])]
    for group, members in zip(groups, ([0, 1, 2], [1, 2, 3]), strict=True):
        if rank in members:
            with mock.patch.dict(os.environ, {"TREE_ATTENTION_NODE": str(rank // 2)}):
                comm = Communicator(group)
            comm.agree((("what", 1),))
            assert comm.topology == Topology((0, 0, 1) if members[0] == 0 else (0, 1, 1))
            dist.destroy_process_group(group)
