# SPDX-License-Identifier: BSD-3-Clause
"""What the cost model and the formulas say about decoding steps on emulated clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tree_attention.exchange import Topology, strategies
from tree_attention.exchange.costs import Calibration, Costs
from tree_attention.exchange.state import Message
from tree_attention.exchange.traffic import Case, Traffic, local, ring, to_ranks, traffic
from tree_attention.ring import MANIFEST_BYTES

from .fake_attention import DTYPE, HEAD_DIM, NUM_HEADS, NUM_HEADS_KV
from .wiring import Wiring

AUTO = "auto"
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


def message_of(batch: int) -> Message:
    """A rank's state of `batch` sequences."""
    return Message((batch, NUM_HEADS, 1), HEAD_DIM, torch.float32)


def topology_of(wiring: Wiring, world_size: int) -> Topology:
    return Topology.of([wiring.node(rank) for rank in range(world_size)])


def shard_bytes(batch: int, keys: int) -> int:
    return 2 * batch * NUM_HEADS_KV * keys * HEAD_DIM * DTYPE.itemsize


def work_of(
    way: str, wiring: Wiring, world_size: int, batch: int, keys: int, attention: float = 0.0
) -> Work:
    """`attention`: seconds for the shard of `keys` keys of each sequence."""
    topology = topology_of(wiring, world_size)
    message = message_of(batch)
    hops = world_size - 1
    far = topology.num_nodes > 1
    if way == "ring":
        shard = shard_bytes(batch, keys)
        hop = replace(to_ranks(int(not far), int(far), shard), messages=2)  # k and v
        once = ring(topology, MANIFEST_BYTES) + local(1, world_size * message.num_bytes)
        total = hops * (shard + MANIFEST_BYTES)
        return Work(total, 1 + hops, once + Traffic(exchanges=1), hop, hops, attention)
    if way == "ring, passing queries":
        # Sequences are dealt, or key heads if there are more of them; some ranks may have none.
        units = max(batch, NUM_HEADS_KV)
        units_of_part = -(-units // world_size)
        rows = units_of_part * (message.num_rows // units)
        part = replace(message, shape=(rows,))
        queries = rows * HEAD_DIM * DTYPE.itemsize
        results = replace(part, dtype=DTYPE)
        hop = replace(to_ranks(int(not far), int(far), queries + part.num_bytes), messages=2)
        hop += local(1, 2 * part.num_bytes)
        once = ring(topology, results.num_bytes) + Traffic(exchanges=1)
        num_parts = min(hops, -(-units // units_of_part))
        total = num_parts * (queries + part.num_bytes) + hops * results.num_bytes
        return Work(total, 2 * hops + 1, once, hop, hops, attention * rows / message.num_rows)
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


def add_predictions(
    row: dict[str, Any],
    wiring: Wiring,
    calibration: Calibration | None,
    elsewhere: Costs | None = None,
) -> None:
    """The model's times and the formulas' counts, to each way of a row.

    `calibration` is of the row's own configuration: "predicted" is what auto goes by, measured
    exchanges where they cover the way, and "modelled" what its constants alone say. `elsewhere` are
    constants of another number of ranks, for "extrapolated".
    """
    world_size, batch, keys = row["world_size"], row["batch"], row["keys"]
    attention = row["seconds_per_key"] * batch * keys
    case = Case(topology_of(wiring, world_size), message_of(batch), DTYPE)
    for name, way in row["ways"].items():
        strategy = way.get("chosen", name)
        work = work_of(strategy, wiring, world_size, batch, keys, attention)
        modelled = None if calibration is None else work.seconds(calibration.costs)
        predicted = modelled
        if calibration is not None and strategy in strategies():
            predicted = calibration.predict(strategy, case) + attention
        way["predicted_seconds"], way["modelled_seconds"] = predicted, modelled
        way["extrapolated_seconds"] = None if elsewhere is None else work.seconds(elsewhere)
        way["formula_bytes"], way["formula_rounds"] = work.bytes_sent, work.rounds
        if "seconds" in way:
            row["wrong"] |= (way["bytes"], way["rounds"]) != (work.bytes_sent, work.rounds)


def costs_of(wiring: Wiring, calibrated: Mapping[Wiring, Costs]) -> Costs | None:
    """Constants for a cluster from those of clusters with one link each."""
    between = calibrated.get(replace(wiring, inside=None, per_node=1))
    if wiring.inside is None or between is None:
        return between
    inside = calibrated.get(Wiring(wiring.inside))
    if inside is None:
        return None
    near = {"steps_inside": inside.steps_between, "bytes_inside": inside.bytes_between}
    return replace(between, **near)
