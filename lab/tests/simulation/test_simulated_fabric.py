# SPDX-License-Identifier: BSD-3-Clause
"""Messages over simulated links: times that a pencil finds."""

from __future__ import annotations

import numpy as np
import pytest

from lab.simulation import Fabric, Level, SimulatedNetwork
from lab.simulation.collectives import all_gather, all_reduce, all_to_all, messages
from lab.simulation.fabric import EVERYBODY
from simulated import one_level


def send(fabric: Fabric, pairs: list[tuple[int, int]], num_bytes: int) -> list[float]:
    sources, targets = np.array(pairs).T
    return fabric.send(fabric.route(sources, targets), num_bytes)[1].tolist()


def test_a_message_takes_overhead_latency_and_its_bytes() -> None:
    network = SimulatedNetwork("test", (Level(EVERYBODY, 1.0, 10.0, overhead=0.5),))
    fabric = Fabric(network, 2)
    assert send(fabric, [(0, 1)], 20) == [0.5 + 1.0 + 2.0]
    # The next one leaves when the port is free again, at 2.5.
    assert send(fabric, [(0, 1)], 20) == [2.5 + 1.0 + 2.0]
    assert fabric.now.tolist() == [1.0, 0.0]
    assert fabric.bytes_sent.tolist() == [40, 0] and fabric.messages_sent.tolist() == [2, 0]


def test_ranks_of_a_node_take_turns_at_their_nic() -> None:
    levels = (Level(2, 0.25, 100.0), Level(EVERYBODY, 1.0, 10.0, ranks_per_port=2))
    fabric = Fabric(SimulatedNetwork("test", levels), 4)
    assert send(fabric, [(0, 2), (1, 3)], 20) == [3.0, 5.0]
    # Inside a node nobody waits for it.
    assert send(fabric, [(0, 1), (1, 0)], 20) == [0.45, 0.45]


def test_receivers_take_turns() -> None:
    fabric = Fabric(one_level(), 4)
    fabric.work(np.array([0.0, 0.5, 0.25, 0.0]))
    # First come, first served: rank 2's message is there before rank 1's.
    assert send(fabric, [(1, 0), (2, 0)], 20) == [1.25 + 4.0, 1.25 + 2.0]
    assert send(fabric, [(3, 0)], 20) == [1.25 + 6.0]


def test_messages_pass_every_level_up_to_the_one_where_they_meet() -> None:
    levels = (
        Level(2, 0.1, 1000.0),
        Level(4, 1.0, 100.0, ranks_per_port=2),
        Level(EVERYBODY, 5.0, 10.0, ranks_per_port=4),
    )
    fabric = Fabric(SimulatedNetwork("test", levels), 8)
    # Through the NICs of nodes 0 and 2 at 100 bytes per second and the uplinks at 10.
    assert send(fabric, [(0, 4)], 100) == [5.0 + 10.0]
    # Node 0 is sending until 1, and receives at the same time; nobody needs an uplink.
    assert send(fabric, [(1, 2), (3, 0)], 100) == [1.0 + 1.0 + 1.0, 1.0 + 1.0]
    assert send(fabric, [(2, 6)], 100) == [10.0 + 5.0 + 10.0]


def test_gloo_asks_first() -> None:
    """Without a receive posted earlier, data wait for the question's answer."""

    def seconds(awaited: np.ndarray | None) -> float:
        fabric = Fabric(one_level(asks_first=True), 2)
        fabric.work(10.0)
        messages(fabric, [(np.array([0, 1]), np.array([1, 0]), 20)], awaited)
        return float(fabric.now.max())

    assert seconds(None) == 10.0 + 1.0 + 1.0 + 2.0
    assert seconds(np.zeros(2)) == 10.0 + 1.0 + 2.0


@pytest.mark.parametrize("chunks", [1, 2])
def test_rings(chunks: int) -> None:
    """A chunk waits for nothing but itself and its turn at the port."""

    def seconds(steps: int) -> float:
        return steps * (1.0 + 2.0 / chunks) + (2.0 - 2.0 / chunks)

    fabric = Fabric(one_level(chunks=chunks, call=100.0), 4)
    all_gather(fabric, 20)
    assert fabric.now.tolist() == pytest.approx([100.0 + seconds(3)] * 4)
    assert fabric.messages_sent.tolist() == [3 * chunks] * 4
    fabric = Fabric(one_level(chunks=chunks), 4)
    all_reduce(fabric, 80)
    assert fabric.now.tolist() == pytest.approx([seconds(6)] * 4)


def test_a_ring_of_nodes_is_as_slow_as_its_slowest_piece() -> None:
    """Two nodes of two: a state crosses between nodes at most twice on its way to all others."""
    levels = (Level(2, 1.0, float("inf")), Level(EVERYBODY, 10.0, float("inf")))
    fabric = Fabric(SimulatedNetwork("test", levels), 4)
    all_gather(fabric, 20)
    # Rank 2's comes to rank 1 over 2 -> 3 -> 0 -> 1; rank 1's over 1 -> 2 -> 3 -> 0, two far.
    assert fabric.now.tolist() == [21.0, 12.0, 21.0, 12.0]


def test_all_to_all_sends_everything_at_once() -> None:
    fabric = Fabric(one_level(), 5)
    all_to_all(fabric, 20)
    assert fabric.now.tolist() == pytest.approx([1.0 + 4 * 2.0] * 5)


@pytest.mark.parametrize(("num_nodes", "hops"), [(1, 3), (2, 3 + 10), (4, 3 + 20), (8, 3 + 30)])
def test_tree(num_nodes: int, hops: int) -> None:
    """NCCL's: along the node, then up a binary tree of nodes, and all the way back."""
    levels = (Level(4, 1.0, float("inf")), Level(EVERYBODY, 10.0, float("inf")))
    fabric = Fabric(SimulatedNetwork("test", levels, tree=True), 4 * num_nodes)
    all_reduce(fabric, 8)
    assert fabric.now.max() == 2 * hops
    # Every rank but the root sends to its parent, and every parent back.
    assert fabric.bytes_sent.sum() == 2 * 8 * (4 * num_nodes - 1)


def test_levels_must_grow() -> None:
    for sizes in ([], [8], [8, 4, EVERYBODY], [8, 8, EVERYBODY]):
        with pytest.raises(ValueError, match=r"levels must grow and end with EVERYBODY"):
            SimulatedNetwork("test", tuple(Level(n, 0.0, 1.0) for n in sizes))
