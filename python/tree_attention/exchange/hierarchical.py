# SPDX-License-Identifier: BSD-3-Clause
"""Nodes first: the ranks of a node merge a slice each, slices go to other nodes, results around.

Between nodes a rank sends its slice to each other node, where an all-gather sends whole states.
The ranks that merge first are `Topology.subtree_size` in a row, so the bits are those of all other
ways; where that is one, all that is left is an all-gather.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..ops import merge_states
from . import all_gather
from .messages import Messages
from .slices import Slices
from .strategy import Exchange, Setting


def prepare(setting: Setting) -> Exchange:
    if setting.topology.subtree_size == 1:
        return all_gather.prepare(setting)
    link, state = setting.link, setting.state
    size = setting.topology.subtree_size
    num_nodes = link.world_size // size
    node, place = divmod(link.rank, size)
    neighbours = [node * size + i for i in range(size)]
    counterparts = [i * size + place for i in range(num_nodes)]

    slices = Slices.of_rows(state.message, size)
    outgoing = slices.messages(state.buffer("slices to send", slices.num_bytes))
    incoming = slices.messages(state.buffer("slices received", slices.num_bytes))
    loads = slices.pairs(outgoing, (state.o, state.lse))
    parts = slices.message.views(incoming)
    inwards = dict(zip(neighbours, incoming, strict=True))
    outwards = dict(zip(neighbours, outgoing, strict=True))
    steps = [Messages(link, inwards, outwards, 0, state.device)]
    merges = []

    if num_nodes > 1:
        # The slice as each node merged it: rounded to a 16-bit o only as a leaf and as a result.
        partial = replace(slices.message, dtype=torch.float32)
        memory = state.buffer("slices of nodes", num_nodes * partial.num_bytes)
        messages = memory.view(num_nodes, partial.num_bytes)
        merges.append((parts, partial.views(messages[node])))
        parts = partial.views(messages)
        steps.append(_spread(setting, counterparts, messages, tag=1))

    results = slices.to(setting.out_dtype)
    gathered = results.messages(state.buffer("merged slices", results.num_bytes))
    merges.append((parts, results.message.views(gathered[place])))
    steps.append(_spread(setting, neighbours, gathered, tag=2))

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        for step in steps:
            step.post()
        for part, place in loads:
            part.copy_(place)
        for step, (step_parts, merged) in zip(steps, merges, strict=False):
            step.run(deadline)
            merge_states(*step_parts, out=merged)
        steps[-1].run(deadline)
        for part, place in results.pairs(gathered, (o, lse)):
            place.copy_(part)

    return exchange


def _spread(setting: Setting, ranks: list[int], messages: Tensor, tag: int) -> Messages:
    """An all-gather in place among `ranks`, in whose order the messages are."""
    own = ranks.index(setting.link.rank)
    others = {rank: messages[i] for i, rank in enumerate(ranks) if i != own}
    outwards = dict.fromkeys(others, messages[own])
    return Messages(setting.link, others, outwards, tag, setting.state.device)
