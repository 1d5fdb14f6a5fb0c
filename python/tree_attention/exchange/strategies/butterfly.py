# SPDX-License-Identifier: BSD-3-Clause
"""Pairs of ranks, then pairs of pairs: log2(ranks) steps, each one state to one other rank.

The usual folding of a world that is no power of two would merge in another order than everybody
else. Here every rank follows the canonical order: after level k it holds the merged state of its
aligned block of 2^k ranks. The last block may be short; its ranks then serve several others each.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ops import merge_states
from ..transport.messages import Round
from . import Context, Exchange, StateLayout, Strategy, Topology, Traffic


@dataclass(frozen=True)
class Level:
    """Step in which a rank merges its block of 2^level ranks with the next or previous block."""

    level: int
    source: int  # a rank of the other block; this rank reads its state
    readers: tuple[int, ...]  # ranks of the other block that read its own
    is_upper: bool  # its block holds the higher ranks


def levels(rank: int, world_size: int) -> list[Level]:
    """The levels at which there is a block to merge this rank's block with."""
    result = []
    for level in range((world_size - 1).bit_length()):
        block = rank >> level
        begin, other = block << level, (block ^ 1) << level
        if other >= world_size:
            continue  # the last block moves up alone
        size, other_size = (min(1 << level, world_size - b) for b in (begin, other))
        readers = (r for r in range(other_size) if begin + r % size == rank)
        source = other + (rank - begin) % other_size
        result.append(Level(level, source, tuple(other + r for r in readers), bool(block & 1)))
    return result


def prepare(context: Context) -> Exchange:
    link, state = context.link, context.state
    steps = {step.level: step for step in levels(link.rank, link.world_size)}
    rounds: list[Round] = []
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    own: list[tuple[Tensor, Tensor]] = []
    for level in range((link.world_size - 1).bit_length()):
        receive: dict[int, Tensor] = {}
        send: dict[int, Tensor] = {}
        step = steps.get(level)
        if step is not None:
            # Only leaves travel with a 16-bit o.
            dtype = state.layout.dtype if level == 0 else torch.float32
            layout = replace(state.layout, dtype=dtype)
            memory = state.buffer(f"pair of level {level}", 2 * layout.message_bytes)
            pair = memory.view(2, layout.message_bytes)
            mine, theirs = pair[int(step.is_upper)], pair[1 - step.is_upper]
            receive, send = {step.source: theirs}, dict.fromkeys(step.readers, mine)
            pairs[level] = layout.views(pair)
            own.append(layout.views(mine))
        rounds.append(link.messages(receive, send, state.device, tag=level))
    leaf = state.o[None], state.lse[None]
    last = len(rounds) - 1  # where all ranks meet

    def exchange(deadline: float, o: Tensor, lse: Tensor) -> None:
        for one in rounds:
            one.post()
        merged = iter(own)
        merge_states(*leaf, out=next(merged))
        for level, one in enumerate(rounds[:-1]):
            one.run(deadline)
            if level in pairs:
                merge_states(*pairs[level], out=next(merged))
        rounds[last].run(deadline)
        merge_states(*pairs[last], out=(o, lse))

    return exchange


def traffic(layout: StateLayout, topology: Topology, *_: object) -> Traffic:
    world_size = topology.world_size
    partial = replace(layout, dtype=torch.float32).num_bytes
    # The ranks that send most are rank 0 and the first ranks of short last blocks.
    firsts = {(world_size - 1) >> level << level for level in range(world_size.bit_length())}

    def bytes_sent(rank: int) -> int:
        steps = levels(rank, world_size)
        return sum(len(s.readers) * (partial if s.level else layout.num_bytes) for s in steps)

    return Traffic((world_size - 1).bit_length(), max(map(bytes_sent, firsts | {0})))


STRATEGY = Strategy(prepare, traffic)
