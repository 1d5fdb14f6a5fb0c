# SPDX-License-Identifier: BSD-3-Clause
"""Algorithm 3 of Tree Attention (arXiv:2408.04093) as it counts its steps, for comparisons.

Three reductions, of maxima, denominators and numerators, each by recursive doubling on this
library's messages: 3 log2(p) steps, where an all-reduce by a ring takes 2 (p - 1) for each.

`tree_allreduce_8_2` has fan-ins of 8 in its lowest level and of 2 in all above, which suits nodes
of 8 ranks. A rank exchanges its part with one rank of every block beside its own in a level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from tree_attention.exchange.strategies import STRATEGIES, Context, Exchange, Strategy, Traffic
from tree_attention.exchange.transport.buffers import CALL_ID_BYTES, StateLayout
from tree_attention.exchange.transport.messages import Round
from tree_attention.exchange.transport.topology import Topology

NAME = "tree_allreduce"
FanIns = tuple[int, ...]  # of the levels from the lowest on, the last one again and again
Sum = Callable[..., Tensor]


@dataclass(frozen=True)
class Level:
    """Step in which blocks of ranks that have reduced their parts reduce those of the blocks."""

    num_blocks: int
    own: int  # the number of this rank's block among them
    sources: dict[int, int]  # the rank of which it reads, by the number of its block
    readers: list[int]  # ranks of the other blocks that read its own


def levels_of(rank: int, world_size: int, fan_ins: FanIns) -> list[Level]:
    """The levels of a rank, as many on all; the last block of a level may be short or alone."""
    result: list[Level] = []
    size = 1
    while size < world_size:
        fan_in = fan_ins[min(len(result), len(fan_ins) - 1)]
        first = rank - rank % (size * fan_in)
        begins = range(first, min(first + size * fan_in, world_size), size)
        own = (rank - first) // size
        place, own_size = rank - begins[own], min(size, world_size - begins[own])
        sources: dict[int, int] = {}
        readers: list[int] = []
        for number, begin in enumerate(begins):
            if number != own:
                other_size = min(size, world_size - begin)
                sources[number] = begin + place % other_size
                readers += range(begin + place, begin + other_size, own_size)
        result.append(Level(len(begins), own, sources, readers))
        size *= fan_in
    return result


class Reduction:
    """An all-reduce of float32 tensors that was prepared, whose bits are the same on all ranks."""

    def __init__(
        self, context: Context, levels: list[Level], name: str, shape: tuple[int, ...], tag: int
    ) -> None:
        link, state = context.link, context.state
        num_bytes = 4 * torch.Size(shape).numel()
        self.rounds: list[Round] = []
        self._parts: list[Tensor] = []
        self._targets: list[Tensor] = []
        for number, level in enumerate(levels):
            memory = state.buffer(
                f"{name}, level {number}", level.num_blocks * (num_bytes + CALL_ID_BYTES)
            ).view(level.num_blocks, num_bytes + CALL_ID_BYTES)
            receive = {rank: memory[block] for block, rank in level.sources.items()}
            send = dict.fromkeys(level.readers, memory[level.own])
            self.rounds.append(link.messages(receive, send, state.device, tag=tag + number))
            parts = memory[:, :num_bytes].view(torch.float32).view(level.num_blocks, *shape)
            self._parts.append(parts)
            self._targets.append(parts[level.own])
        self.own = self._targets[0]
        result = state.buffer(f"{name}, result", num_bytes).view(torch.float32).view(shape)
        self._targets = [*self._targets[1:], result]

    def run(self, deadline: float, combine: Sum) -> Tensor:
        """The parts of all ranks, of which this rank's is in `own`, combined in rank order."""
        for one, parts, target in zip(self.rounds, self._parts, self._targets, strict=True):
            one.run(deadline)
            combine(parts, 0, out=target)
        return self._targets[-1]


def prepare(fan_ins: FanIns, context: Context) -> Exchange:
    state, link = context.state, context.link
    rows = state.lse.shape
    levels = levels_of(link.rank, link.world_size, fan_ins)
    shapes = {"maxima": rows, "denominators": rows, "numerators": state.o.shape}
    maxima, denominators, numerators = reductions = [
        Reduction(context, levels, name, shape, number * len(levels))
        for number, (name, shape) in enumerate(shapes.items())
    ]
    is_empty = state.buffer("empty rows", rows.numel()).view(torch.bool).view(rows)

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        for reduction in reductions:
            for one in reduction.rounds:
                one.post()
        maxima.own.copy_(state.lse)
        # Empty on all ranks: any finite shift gives the denominator 0 and lse -inf.
        largest = maxima.run(deadline, torch.amax).clamp_(min=torch.finfo(torch.float32).min)
        torch.sub(state.lse, largest, out=denominators.own).exp_()
        torch.mul(state.o, denominators.own[..., None], out=numerators.own)
        # The o of an empty state may be uninitialised, and 0 * NaN is NaN.
        torch.isneginf(state.lse, out=is_empty)
        numerators.own.masked_fill_(is_empty[..., None], 0.0)
        denominator = denominators.run(deadline, torch.sum)
        numerator = numerators.run(deadline, torch.sum)
        torch.log(denominator, out=lse).add_(largest)
        # The rank of the maximum adds 1, so only the denominator of an empty row is below.
        o.copy_(numerator.div_(denominator.clamp_(min=1.0)[..., None]))

    return exchange


def traffic(fan_ins: FanIns, layout: StateLayout, topology: Topology, *_: object) -> Traffic:
    every = [levels_of(r, topology.world_size, fan_ins) for r in range(topology.world_size)]
    most = max(sum(len(level.readers) for level in levels) for levels in every)
    return Traffic(3 * len(every[0]), most * (8 * layout.num_rows + layout.o_bytes))


@cache
def tree(*fan_ins: int) -> Strategy:
    """The strategy by trees of these fan-ins."""
    return Strategy(
        partial(prepare, fan_ins), partial(traffic, fan_ins), is_canonical=False, takes_16_bit=False
    )


def strategy_of(name: str) -> Strategy:
    """A strategy of the library, or a tree: "tree_allreduce" or with fan-ins behind its name."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    known, *fan_ins = name.removeprefix(NAME).split("_")
    if not name.startswith(NAME) or known:
        raise KeyError(name)
    return tree(*map(int, fan_ins or "2"))


@contextmanager
def registered(*names: str) -> Iterator[None]:
    """Lets calls of the library in this process take these trees as strategies."""
    STRATEGIES.update({name: strategy_of(name) for name in names or (NAME,)})
    try:
        yield
    finally:
        for name in names or (NAME,):
            del STRATEGIES[name]
