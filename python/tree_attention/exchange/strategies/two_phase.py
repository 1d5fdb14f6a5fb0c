# SPDX-License-Identifier: BSD-3-Clause
"""Every rank merges a slice of the rows for all: an all-to-all, the merge, an all-gather.

The all-gather is left out where each rank wants its own heads only, as in the decode context
parallelism of Helix (arXiv:2507.07120).
"""

import torch
from torch import Tensor

from ...ops import merge_states
from ..transport.buffers import Slices, share
from . import Context, Exchange, StateLayout, Strategy, Topology, Traffic


def prepare(context: Context) -> Exchange:
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


def traffic(
    layout: StateLayout, topology: Topology, out_dtype: torch.dtype, head_sharded: bool
) -> Traffic:
    slices = Slices.of(layout, topology.world_size, head_sharded)
    num_bytes = slices.layout.num_bytes
    if not head_sharded:
        num_bytes += slices.to(out_dtype).layout.num_bytes
    return Traffic(1 if head_sharded else 2, (topology.world_size - 1) * num_bytes)


STRATEGY = Strategy(prepare, traffic, can_shard_heads=True)
