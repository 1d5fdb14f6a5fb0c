# SPDX-License-Identifier: BSD-3-Clause
"""Nodes first: the ranks of a node merge a slice each, slices go to other nodes, results around.

Between nodes a rank sends its slice to each other node directly, where an all-gather sends whole
states. The ranks that merge first are `Topology.subtree_size` in a row, so the bits equal those
of the other strategies. Where that is one, the strategy is `all_gather`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...ops import merge_states
from ..transport.buffers import Slices
from ..transport.messages import Round
from . import Context, Exchange, HeadSharding, StateLayout, Strategy, Topology, Traffic, all_gather


def prepare(context: Context) -> Exchange:
    size = context.topology.subtree_size
    if size == 1:
        return all_gather.prepare(context)
    link, state = context.link, context.state
    num_nodes = link.world_size // size
    node, place = divmod(link.rank, size)
    neighbours = [node * size + i for i in range(size)]
    counterparts = [i * size + place for i in range(num_nodes)]

    slices = Slices.of(state.layout, size)
    outgoing = slices.rows_of(state.buffer("slices to send", slices.num_bytes))
    incoming = slices.rows_of(state.buffer("slices received", slices.num_bytes))
    loads = slices.pairs(outgoing, (state.o, state.lse))
    parts = slices.layout.views(incoming)
    inwards = dict(zip(neighbours, incoming, strict=True))
    outwards = dict(zip(neighbours, outgoing, strict=True))
    rounds = [link.messages(inwards, outwards, state.device)]
    merges = []

    if num_nodes > 1:
        # The slice as each node merged it: rounded to a 16-bit o only as a leaf and as a result.
        partial = replace(slices.layout, dtype=torch.float32)
        memory = state.buffer("slices of nodes", num_nodes * partial.message_bytes)
        of_nodes = memory.view(num_nodes, partial.message_bytes)
        merges.append((parts, partial.views(of_nodes[node])))
        parts = partial.views(of_nodes)
        rounds.append(_spread(context, counterparts, of_nodes, tag=1))

    results = slices.to(context.out_dtype)
    gathered = results.rows_of(state.buffer("merged slices", results.num_bytes))
    merges.append((parts, results.layout.views(gathered[place])))
    rounds.append(_spread(context, neighbours, gathered, tag=2))

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        for one in rounds:
            one.post()
        for part, place in loads:
            part.copy_(place)
        for one, (round_parts, merged) in zip(rounds, merges, strict=False):
            one.run(deadline)
            merge_states(*round_parts, out=merged)
        rounds[-1].run(deadline)
        for part, place in results.pairs(gathered, (o, lse)):
            place.copy_(part)

    return exchange


def _spread(context: Context, ranks: list[int], rows: Tensor, tag: int) -> Round:
    """An all-gather in place among `ranks`, in whose order the rows of bytes are."""
    own = ranks.index(context.link.rank)
    others = {rank: rows[i] for i, rank in enumerate(ranks) if i != own}
    outwards = dict.fromkeys(others, rows[own])
    return context.link.messages(others, outwards, context.state.device, tag)


def traffic(
    layout: StateLayout, topology: Topology, out_dtype: torch.dtype, head_sharded: HeadSharding
) -> Traffic:
    size = topology.subtree_size
    if size == 1:
        return all_gather.traffic(layout, topology, out_dtype, head_sharded)
    num_nodes = topology.world_size // size
    slices = Slices.of(layout, size)
    leaf, partial, result = (
        slices.to(dtype).layout.num_bytes for dtype in (layout.dtype, torch.float32, out_dtype)
    )
    num_bytes = (size - 1) * (leaf + result) + (num_nodes - 1) * partial
    return Traffic(2 if num_nodes == 1 else 3, num_bytes)


STRATEGY = Strategy(prepare, traffic)
