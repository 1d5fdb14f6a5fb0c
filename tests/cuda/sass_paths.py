# SPDX-License-Identifier: BSD-3-Clause
"""The fewest instructions that a warp executes between two visits of a place of a kernel."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;")
_LEAVES_BLOCK = re.compile(r"BRA|EXIT|RET|BSYNC|BSSY|CALL")


@dataclass
class Block:
    """Instructions that are executed one after the other, and the blocks that may follow."""

    instructions: list[str] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


def blocks_of(lines: Sequence[str]) -> list[Block]:
    """The blocks of one kernel, from nvdisasm's lines. Lanes of a warp are taken to stay together
    (BRA.DIV), a called function for nothing, and BSYNC for the place that its BSSY names."""
    code: list[tuple[bool, str]] = []  # whether it has a predicate
    labels: dict[str, int] = {}
    for line in lines:
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(code)
        elif (match := _INSTRUCTION.search(line)) is not None:
            code.append((match[1] is not None, match[2]))
    ends = {i + 1 for i, (_, text) in enumerate(code) if _LEAVES_BLOCK.match(text)}
    starts = sorted({0, *labels.values(), *ends} - {len(code)})
    number = {start: i for i, start in enumerate(starts)}
    blocks = []
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(code)], strict=True)):
        block = Block([text for _, text in code[start:end]], [i + 1] if end < len(code) else [])
        has_predicate, last = code[end - 1]
        if last.startswith("BRA") and not last.startswith("BRA.DIV"):
            is_conditional = has_predicate or re.match(r"BRA\S*\s+!?U?P\d", last) is not None
            target = re.search(r"`\((\S+?)\)", last)
            assert target is not None, last
            block.next = [number[labels[target[1]]], *(block.next if is_conditional else [])]
        elif re.match("EXIT|RET", last) and not has_predicate:
            block.next = []
        blocks.append(block)
    _resolve_syncs(blocks, number, labels)
    return blocks


def _resolve_syncs(blocks: list[Block], number: dict[int, int], labels: dict[str, int]) -> None:
    """Lets a block that ends with BSYNC be followed by what the BSSY that reaches it names."""
    reaching: list[dict[str, set[int]]] = [{} for _ in blocks]
    seen, work = {0}, [0]
    while work:
        i = work.pop()
        state, last = dict(reaching[i]), blocks[i].instructions[-1]
        if (match := re.match(r"BSSY\S*\s+(B\d+), `\((\S+?)\)", last)) is not None:
            state[match[1]] = {number[labels[match[2]]]}
        elif (match := re.match(r"BSYNC\S*\s+(B\d+)", last)) is not None and match[1] in state:
            blocks[i].next = sorted(state[match[1]])
        for j in blocks[i].next:
            news = [b for b, targets in state.items() if not targets <= reaching[j].get(b, set())]
            for barrier in news:
                reaching[j][barrier] = reaching[j].get(barrier, set()) | state[barrier]
            if news or j not in seen:
                seen.add(j)
                work.append(j)


def shortest_cycle(blocks: Sequence[Block], anchor: str, needed: dict[str, int]) -> int:
    """The length of the shortest way from the first block with an instruction like `anchor` back to
    it, with at least so many instructions of each pattern in `needed`."""

    def count(block: Block, pattern: str) -> int:
        return sum(re.match(pattern, text) is not None for text in block.instructions)

    counts = [[count(block, pattern) for pattern in needed] for block in blocks]
    start = next(i for i, block in enumerate(blocks) if count(block, anchor))
    goal = tuple(needed.values())

    def after(passed: tuple[int, ...], i: int) -> tuple[int, ...]:
        return tuple(min(g, n + c) for g, n, c in zip(goal, passed, counts[i], strict=True))

    begin = start, after((0,) * len(goal), start)
    best = {begin: len(blocks[start].instructions)}
    queue = [(best[begin], *begin)]
    while queue:
        length, i, passed = heapq.heappop(queue)
        if length > best[i, passed]:
            continue
        for j in blocks[i].next:
            if j == start and passed == goal:
                return length
            place = j, after(passed, j)
            new = length + len(blocks[j].instructions)
            if new < best.get(place, new + 1):
                best[place] = new
                heapq.heappush(queue, (new, *place))
    raise ValueError(f"no way from {anchor} back to it with {needed}")
