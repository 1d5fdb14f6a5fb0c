# SPDX-License-Identifier: BSD-3-Clause
"""Every rank merges a slice of the rows for all: an all-to-all, the merge, an all-gather.

The all-gather is left out where each rank wants its own heads only, as in the decode context
parallelism of Helix (arXiv:2507.07120).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...ops import merge_states
from ..transport.buffers import Slices, share
from . import Context, Exchange, HeadSharding, StateLayout, Strategy, Topology, Traffic


def prepare(context: Context) -> Exchange:
    if isinstance(context.head_sharded, tuple):
        return _prepare_parts(context, context.head_sharded)
    link, state = context.link, context.state
    slices = Slices.of(state.layout, link.world_size, context.head_sharded)
    outgoing = slices.rows_of(state.buffer("slices to send", slices.num_bytes))
    incoming = slices.rows_of(state.buffer("slices received", slices.num_bytes))
    loads = slices.pairs(outgoing, (state.o, state.lse))
    transpose = link.transpose(incoming, outgoing, state.device)
    o_parts, lse_parts = slices.layout.views(incoming)

    def exchange_slices(deadline: float) -> None:
        for part, place in loads:
            part.copy_(place)
        transpose.run(deadline)

    if context.head_sharded:
        count = share(slices.count, slices.num_slices, link.rank)
        own = o_parts[:, :, :count], lse_parts[:, :, :count]

        def exchange_heads(deadline: float, o: Tensor, lse: Tensor) -> None:
            exchange_slices(deadline)
            merge_states(*own, out=(o, lse))

        return exchange_heads

    results = slices.to(context.out_dtype)
    result = state.buffer("merged slice", results.layout.message_bytes)
    merged = results.layout.views(result)
    gathered = results.rows_of(state.buffer("merged slices", results.num_bytes))
    gather = link.gather(gathered, result, state.device, tag=1)

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        gather.post()
        exchange_slices(deadline)
        merge_states(o_parts, lse_parts, out=merged)
        gather.run(deadline)
        for part, place in results.pairs(gathered, (o, lse)):
            place.copy_(part)

    return exchange


def _prepare_parts(context: Context, counts: Sequence[int]) -> Exchange:
    """Parts of `counts` heads, sent at their own lengths. Padded to the longest, parts of unequal
    ranks could be as many times the bytes as there are ranks."""
    link, state = context.link, context.state
    layouts = _parts(state.layout, counts)
    sizes = [part.message_bytes for part in layouts]
    outgoing = state.buffer("slices to send", sum(sizes)).split(sizes)
    own, num_bytes = layouts[link.rank], link.world_size * sizes[link.rank]
    incoming = state.buffer("slices received", num_bytes).view(link.world_size, -1)
    places = zip(state.o.split(counts, 1), state.lse.split(counts, 1), strict=True)
    loads = [
        pair
        for part, memory, place in zip(layouts, outgoing, places, strict=True)
        for pair in zip(part.views(memory), place, strict=True)
    ]
    receive, send = dict(enumerate(incoming)), dict(enumerate(outgoing))
    transpose = link.messages(receive, send, state.device)
    o_parts, lse_parts = own.views(incoming)

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        for part, place in loads:
            part.copy_(place)
        transpose.run(deadline)
        if counts[link.rank]:
            merge_states(o_parts, lse_parts, out=(o, lse))

    return exchange


def _parts(layout: StateLayout, counts: Sequence[int]) -> list[StateLayout]:
    batch, _, seqlen_q = layout.shape
    return [replace(layout, shape=(batch, count, seqlen_q)) for count in counts]


def traffic(
    layout: StateLayout, topology: Topology, out_dtype: torch.dtype, head_sharded: HeadSharding
) -> Traffic:
    if isinstance(head_sharded, tuple):
        sizes = [part.num_bytes for part in _parts(layout, head_sharded)]
        return Traffic(1, sum(sizes) - min(sizes))
    slices = Slices.of(layout, topology.world_size, head_sharded)
    num_bytes = slices.layout.num_bytes
    if not head_sharded:
        num_bytes += slices.to(out_dtype).layout.num_bytes
    return Traffic(1 if head_sharded else 2, (topology.world_size - 1) * num_bytes)


STRATEGY = Strategy(prepare, traffic, can_shard_heads=True)
