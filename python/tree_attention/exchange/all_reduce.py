# SPDX-License-Identifier: BSD-3-Clause
"""Tree Attention (arXiv:2408.04093), Algorithm 3: maxima first, then sums relative to them.

The library's all-reduce adds in an order of its own, so the bits are not those of the other ways.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .state import Message
from .strategy import Exchange, Setting


def prepare_three(setting: Setting) -> Exchange:
    """As published, for any batch and number of queries."""
    return _prepare(setting, packed=False)


def prepare_two(setting: Setting) -> Exchange:
    """Numerators and denominators in one sum."""
    return _prepare(setting, packed=True)


def _prepare(setting: Setting, packed: bool) -> Exchange:
    link, state = setting.link, setting.state
    message: Message = state.message
    memory = state.buffer("sums", message.num_bytes).view(torch.float32)
    numerator, denominator = message.views(memory.view(torch.uint8))
    largest = state.buffer("maxima", 4 * message.num_rows).view(torch.float32).view_as(state.lse)
    is_empty = state.buffer("empty rows", message.num_rows).view(torch.bool).view_as(state.lse)
    lowest = torch.finfo(torch.float32).min

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        largest.copy_(state.lse)
        link.all_reduce(largest, dist.ReduceOp.MAX, deadline)
        # Empty on all ranks: any finite shift gives the denominator 0 and lse -inf.
        largest.clamp_(min=lowest)
        torch.sub(state.lse, largest, out=denominator).exp_()
        torch.mul(state.o, denominator[..., None], out=numerator)
        # The o of an empty state may be uninitialised, and 0 * NaN is NaN.
        torch.isneginf(state.lse, out=is_empty)
        numerator.masked_fill_(is_empty[..., None], 0.0)
        for tensor in (memory,) if packed else (denominator, numerator):
            link.all_reduce(tensor, dist.ReduceOp.SUM, deadline)
        torch.log(denominator, out=lse).add_(largest)
        # The rank of the maximum adds 1, so only the denominator of an empty row is below.
        o.copy_(numerator.div_(denominator.clamp_(min=1.0)[..., None]))

    return exchange
