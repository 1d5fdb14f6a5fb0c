# SPDX-License-Identifier: BSD-3-Clause
"""Every rank merges a slice of the rows for all: an all-to-all, the merge, an all-gather.

The second collective is left out where each rank wants its own heads only, as in the decode context
parallelism of Helix (arXiv:2507.07120).
"""

from __future__ import annotations

from torch import Tensor

from ..ops import merge_states
from .messages import gather_round
from .slices import Slices
from .strategy import Exchange, Setting


def prepare(setting: Setting) -> Exchange:
    link, state = setting.link, setting.state
    deal = Slices.of_heads if setting.head_sharded else Slices.of_rows
    slices = deal(state.message, link.world_size)
    outgoing = slices.messages(state.buffer("slices to send", slices.num_bytes))
    incoming = slices.messages(state.buffer("slices received", slices.num_bytes))
    loads = slices.pairs(outgoing, (state.o, state.lse))
    o_parts, lse_parts = slices.message.views(incoming)

    def exchange_slices(deadline: float) -> None:
        for part, place in loads:
            part.copy_(place)
        link.all_to_all(incoming, outgoing, deadline)

    if setting.head_sharded:
        count = slices.count_in(link.rank)
        own = o_parts[:, :, :count], lse_parts[:, :, :count]

        def exchange_heads(deadline: float, o: Tensor, lse: Tensor) -> None:
            exchange_slices(deadline)
            merge_states(*own, out=(o, lse))

        return exchange_heads

    results = slices.to(setting.out_dtype)
    result = state.buffer("merged slice", results.message.num_bytes)
    merged = results.message.views(result)
    gathered = results.messages(state.buffer("merged slices", results.num_bytes))
    gather = gather_round(link, gathered, result, 0, state.device)

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        gather.post()
        exchange_slices(deadline)
        merge_states(o_parts, lse_parts, out=merged)
        gather.run(deadline)
        for part, place in results.pairs(gathered, (o, lse)):
            place.copy_(part)

    return exchange
