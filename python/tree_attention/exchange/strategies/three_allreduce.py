# SPDX-License-Identifier: BSD-3-Clause
"""Tree Attention (arXiv:2408.04093), Algorithm 3: all-reduces of maxima, denominators, numerators.

As published, for any batch and number of queries. The library's all-reduce adds in an order of its
own, so the bits are not those of the canonical strategies. Over Gloo it is a ring of 2(p-1) steps,
where the paper counts on a tree of log p.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..transport.buffers import CALL_ID_BYTES
from ..transport.messages import OTHER_CALL
from . import Context, Exchange, StateLayout, Strategy, Topology, Traffic

# Integers below it are float32 values, exactly.
_EXACT = 1 << 24


def prepare(context: Context) -> Exchange:
    link, state = context.link, context.state
    layout = state.layout
    memory = state.buffer("sums", layout.num_bytes).view(torch.float32)
    numerator, denominator = layout.views(memory.view(torch.uint8))
    # The maxima of lse are followed by the largest call id and the negative of the smallest one.
    maxima = state.buffer("maxima", 4 * layout.num_rows + CALL_ID_BYTES).view(torch.float32)
    largest, ids = maxima[:-2].view_as(state.lse), maxima[-2:]
    is_host = link.transport_device(state.device).type == "cpu"  # which waits for all messages
    is_empty = state.buffer("empty rows", layout.num_rows).view(torch.bool).view_as(state.lse)
    lowest = torch.finfo(torch.float32).min

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        largest.copy_(state.lse)
        # Above 0, which is what a replay sends.
        call_id = float(1 + link.call_id % (_EXACT - 1))
        if is_host:
            ids[0], ids[1] = call_id, -call_id
        link.all_reduce(maxima, dist.ReduceOp.MAX, deadline)
        if is_host and ids.tolist() != [call_id, -call_id]:
            link.call_id = OTHER_CALL
        # Empty on all ranks: any finite shift gives the denominator 0 and lse -inf.
        largest.clamp_(min=lowest)
        torch.sub(state.lse, largest, out=denominator).exp_()
        torch.mul(state.o, denominator[..., None], out=numerator)
        # The o of an empty state may be uninitialised, and 0 * NaN is NaN.
        torch.isneginf(state.lse, out=is_empty)
        numerator.masked_fill_(is_empty[..., None], 0.0)
        for tensor in (denominator, numerator):
            link.all_reduce(tensor, dist.ReduceOp.SUM, deadline)
        torch.log(denominator, out=lse).add_(largest)
        # The rank of the maximum adds 1, so only the denominator of an empty row is below.
        o.copy_(numerator.div_(denominator.clamp_(min=1.0)[..., None]))

    return exchange


def traffic(layout: StateLayout, topology: Topology, *_: object) -> Traffic:
    # All-reduces, each a ring's reduce-scatter and all-gather.
    rows, steps = 4 * layout.num_rows, 2 * (topology.world_size - 1)
    sizes = (rows + CALL_ID_BYTES, rows, layout.o_bytes)
    num_bytes = sum(steps * size // topology.world_size for size in sizes)
    return Traffic(len(sizes) * steps, num_bytes)


STRATEGY = Strategy(prepare, traffic, is_canonical=False, takes_16_bit=False)
