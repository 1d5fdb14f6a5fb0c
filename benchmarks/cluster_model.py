# SPDX-License-Identifier: BSD-3-Clause
"""What the cost model and the formulas say about the rows of bench_cluster.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tree_attention.exchange import Topology
from tree_attention.exchange.costs import Costs
from tree_attention.exchange.state import Message
from tree_attention.exchange.traffic import Case, Traffic, local, ring, to_ranks, traffic
from tree_attention.ring import MANIFEST_BYTES

from .cluster import Wiring
from .cluster_rank import DTYPE, HEAD_DIM, NUM_HEADS, NUM_HEADS_KV

_NOTHING = Traffic()


@dataclass(frozen=True)
class Work:
    """One decoding step of the busiest rank, attention included."""

    bytes_sent: int
    rounds: int  # collectives, and rounds of messages
    once: Traffic
    per_hop: Traffic = _NOTHING
    hops: int = 0
    attention: float = 0.0  # seconds of one shard, or of the part of it that a hop attends to

    def seconds(self, costs: Costs) -> float:
        """A hop travels while the rank computes; the last computation has nothing beside it."""
        hop = max(self.attention, costs.seconds(self.per_hop))
        return costs.seconds(self.once) + self.hops * hop + self.attention


def work_of(
    way: str, wiring: Wiring, world_size: int, batch: int, keys: int, attention: float = 0.0
) -> Work:
    """`attention`: seconds for the shard of `keys` keys of each sequence."""
    topology = Topology.of([wiring.node(rank) for rank in range(world_size)])
    message = Message((batch, NUM_HEADS, 1), HEAD_DIM, torch.float32)
    hops = world_size - 1
    far = topology.num_nodes > 1
    if way == "ring":
        shard = 2 * batch * NUM_HEADS_KV * keys * HEAD_DIM * DTYPE.itemsize
        hop = replace(to_ranks(int(not far), int(far), shard), messages=2)  # k and v
        once = ring(topology, MANIFEST_BYTES) + local(1, world_size * message.num_bytes)
        total = hops * (shard + MANIFEST_BYTES)
        return Work(total, 1 + hops, once + Traffic(exchanges=1), hop, hops, attention)
    if way == "ring, passing queries":
        part = replace(message, shape=(message.num_rows // world_size,))
        queries = part.num_rows * HEAD_DIM * DTYPE.itemsize
        results = replace(part, dtype=DTYPE)
        hop = replace(to_ranks(int(not far), int(far), queries + part.num_bytes), messages=2)
        hop += local(1, 2 * part.num_bytes)
        once = ring(topology, results.num_bytes) + Traffic(exchanges=1)
        total = hops * (queries + part.num_bytes + results.num_bytes)
        return Work(total, 2 * hops + 1, once, hop, hops, attention / world_size)
    once = traffic(way, Case(topology, message, DTYPE))
    return Work(once.bytes_sent, _rounds(way, topology), once, attention=attention)


def _rounds(strategy: str, topology: Topology) -> int:
    levels = (topology.world_size - 1).bit_length()
    size = topology.subtree_size
    in_nodes = 1 if size == 1 else 2 if size == topology.world_size else 3
    return {
        "all_gather": 1,
        "two_phase": 2,
        "hierarchical": in_nodes,
        "butterfly": levels,
        "three_allreduce": 3,
        "max_then_sum": 2,
    }[strategy]


def costs_of(wiring: Wiring, calibrated: dict[Wiring, Costs]) -> Costs | None:
    """Constants for a cluster from those of clusters with one link each."""
    between = calibrated.get(replace(wiring, inside=None, per_node=1))
    if wiring.inside is None or between is None:
        return between
    inside = calibrated.get(Wiring(wiring.inside))
    if inside is None:
        return None
    near = {"steps_inside": inside.steps_between, "bytes_inside": inside.bytes_between}
    return replace(between, **near)
