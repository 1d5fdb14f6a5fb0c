# SPDX-License-Identifier: BSD-3-Clause
"""What reserving memory wastes, of three kinds (arXiv:2309.06180, section 3.1 and Figure 2).

Requests of random lengths come in one queue, which never ends, and each running one gains a token
at every step. A slot of the memory is *used* by a token, *reserved* for a token that its request
will still make, *internal* if its request holds it and never fills it, or *external* if no request
holds it. Reserved slots are waste while they wait, as another request could use them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KINDS = ("used", "reserved", "internal", "external")


@dataclass
class Request:
    prompt: int
    total: int  # tokens when it ends
    length: int = 0
    begin: int = 0  # its slots, where they are contiguous
    size: int = 0


# How many slots a request gets at once, of its prompt, its total and the largest total.
Reserve = Callable[[Request, int], int]
RESERVATIONS: dict[str, Reserve] = {
    "the largest length": lambda request, largest: largest,
    "the next power of two": lambda request, largest: 1 << (request.total - 1).bit_length(),
    "the final length, known ahead": lambda request, largest: request.total,
}


def requests(seed: int, largest: int) -> Callable[[], Request]:
    """Draws prompts and answers whose lengths are log-normal, cut at `largest` together."""
    draw = random.Random(seed)

    def request() -> Request:
        prompt, answer = (max(1, int(draw.lognormvariate(5.0, 1.0))) for _ in range(2))
        prompt = min(prompt, largest // 2)
        return Request(prompt, min(prompt + answer, largest), prompt)

    return request


def first_gap(running: list[Request], slots: int, size: int) -> int | None:
    """The first place with `size` free slots in a row."""
    end = 0
    for request in sorted(running, key=lambda one: one.begin):
        if request.begin - end >= size:
            return end
        end = request.begin + request.size
    return end if slots - end >= size else None


def shares(samples: Sequence[tuple[int, ...]], slots: int) -> dict[str, float]:
    return {
        kind: sum(x) / len(x) / slots
        for kind, x in zip(KINDS, zip(*samples, strict=True), strict=True)
    }


def reserved_memory(
    reserve: Reserve, *, slots: int, largest: int, steps: int, seed: int
) -> dict[str, float]:
    """Shares of the memory by kind, on average over the second half of the steps."""
    draw = requests(seed, largest)
    running: list[Request] = []
    waiting, samples = draw(), []
    for step in range(steps):
        while True:
            size = reserve(waiting, largest)
            begin = first_gap(running, slots, size)
            if begin is None:
                break
            waiting.begin, waiting.size = begin, size
            running.append(waiting)
            waiting = draw()
        if step >= steps // 2:
            held = sum(one.size for one in running)
            used, total = sum(one.length for one in running), sum(one.total for one in running)
            samples.append((used, total - used, held - total, slots - held))
        running = grown(running)
    return shares(samples, slots)


def grown(running: list[Request]) -> list[Request]:
    """The requests after a step, without those that have ended."""
    for one in running:
        one.length += 1
    return [one for one in running if one.length <= one.total]


def paged_memory(
    block: int, *, slots: int, largest: int, steps: int, seed: int
) -> dict[str, float]:
    """The same for blocks that are taken when they are needed.

    Where none is left, the newest request gives its blocks back (its rows are swapped to the host)
    and waits. Only the last block of a request has slots that are not used.
    """
    draw = requests(seed, largest)
    running: list[Request] = []
    waiting, samples = [draw()], []

    def blocks(one: Request) -> int:
        return -(-one.length // block)

    for step in range(steps):
        while sum(map(blocks, running)) > slots // block:
            waiting.append(running.pop())
        while sum(map(blocks, running)) + blocks(waiting[-1]) <= slots // block:
            running.append(waiting.pop())
            waiting = waiting or [draw()]
        if step >= steps // 2:
            held = sum(map(blocks, running)) * block
            used = sum(one.length for one in running)
            ahead = sum(min(one.total, blocks(one) * block) - one.length for one in running)
            samples.append((used, ahead, held - used - ahead, slots - held))
        running = grown(running)
    return shares(samples, slots)
