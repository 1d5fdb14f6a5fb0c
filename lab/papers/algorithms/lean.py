# SPDX-License-Identifier: BSD-3-Clause
"""LeanAttention's Algorithms 2, 3 and 4 (arXiv:2405.10480), and a checker of their indices.

Tensors are those of `flash`. Queries are cut into blocks of `tile_m` rows and keys into LeanTiles
of `tile_n`. The LeanTile iterations of all output tiles lie end to end on one line, and each CTA (a
worker) runs a contiguous range of it, which may cross output tiles. The CTA with the first
iteration of an output tile is its *host*. If the host's range ends before the tile does, it waits
for the parts of the CTAs after it, up to the last one that has iterations of the tile, and merges
them. Algorithm 4 prints the share of a CTA (line 7) and the number of that last CTA (line 26)
wrongly; `run` takes the arithmetic of any schedule. lab/papers/README.md has what else
is mended here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from torch import Tensor

from .flash import State, blocks, empty_state, normalise, rescale, tile_by_tile, tile_state

T = TypeVar("T")


@dataclass(frozen=True)
class AsPrinted:
    """`outputs` output tiles of `tile_iters` (C_n) iterations each over `ctas` (G) workers."""

    outputs: int
    tile_iters: int
    ctas: int

    @property
    def iters(self) -> int:
        """I of line 6, whose printed product C_m C_n lacks the heads and the batch."""
        return self.outputs * self.tile_iters

    @property
    def grid(self) -> int:
        """Number of CTAs that are launched."""
        return self.ctas

    @property
    def share(self) -> int:
        return self.iters // self.ctas

    def start(self, cta: int) -> int:
        """The first iteration of a CTA, and the end of the one before it."""
        return min(cta * self.share, self.iters)

    def last_cta(self, tile_iter_end: int) -> int:
        """The last CTA whose part belongs to the output tile that ends before `tile_iter_end`."""
        return tile_iter_end // self.tile_iters


class AsPrintedRoundedUp(AsPrinted):
    """With the share of a CTA rounded up."""

    @property
    def share(self) -> int:
        return -(-self.iters // self.ctas)


class LastByShare(AsPrintedRoundedUp):
    """With a CTA too far where an output tile ends with the range of a CTA."""

    def last_cta(self, tile_iter_end: int) -> int:
        return tile_iter_end // self.share


class CorrectedLast(AsPrintedRoundedUp):
    """With the CTA that runs the last iteration of the output tile."""

    def last_cta(self, tile_iter_end: int) -> int:
        return (tile_iter_end - 1) // self.share


class Balanced(AsPrinted):
    """With shares that differ by one at most, and are never empty: a host would wait forever."""

    @property
    def grid(self) -> int:
        return min(self.ctas, self.iters)

    def start(self, cta: int) -> int:
        return cta * self.iters // self.grid

    def last_cta(self, tile_iter_end: int) -> int:
        return (tile_iter_end * self.grid - 1) // self.iters


SCHEDULES = (AsPrinted, AsPrintedRoundedUp, LastByShare, CorrectedLast, Balanced)


def run(
    schedule: AsPrinted,
    lean_tile: Callable[[int, int, int], T],
    merge: Callable[[T, T], T],
    order: Sequence[int] | None = None,
) -> tuple[dict[int, T], list[int]]:
    """Runs all CTAs, in turns of the given order, until each has ended or waits forever.

    The order decides nothing: a CTA writes at most one part, for the first tile of its range,
    nobody erases it, and what a CTA waits for does not depend on who came first.

    Args:
        lean_tile: the state of the iterations `[begin, end)` of an output tile.
        merge: the state of two of them, of which the first has the lower keys.

    Returns:
        outputs: the state of each output tile that was written.
        waiting: the CTAs that wait for a part that nobody will leave.
    """
    parts: dict[int, T] = {}  # in slow memory: an entry is part and flag at once
    outputs: dict[int, T] = {}

    def cta(g: int) -> Iterator[int]:
        """Lines 9 to 42 of Algorithm 4 for CTA `g`; yields the CTA that it waits for."""
        iteration, cta_end = schedule.start(g), schedule.start(g + 1)
        while iteration < cta_end:
            tile = iteration // schedule.tile_iters
            tile_iter = tile * schedule.tile_iters
            tile_iter_end = tile_iter + schedule.tile_iters
            state = lean_tile(tile, iteration - tile_iter, min(tile_iter_end, cta_end) - tile_iter)
            if iteration != tile_iter:
                parts[g] = state
            else:
                if cta_end < tile_iter_end:
                    for other in range(g + 1, schedule.last_cta(tile_iter_end) + 1):
                        while other not in parts:
                            yield other
                        state = merge(state, parts[other])
                outputs[tile] = state
            iteration = tile_iter_end

    running = {g: cta(g) for g in (range(schedule.grid) if order is None else order)}
    while running:
        waiting_for = {g: next(program, None) for g, program in running.items()}
        running = {g: program for g, program in running.items() if waiting_for[g] is not None}
        if not any(waiting_for[g] is None or waiting_for[g] in parts for g in waiting_for):
            break
    return outputs, list(running)


def outcome(schedule: AsPrinted, order: Sequence[int] | None = None) -> str:
    """Check that each output tile gets each iteration once, in order: right, wrong or hangs."""

    def tiles(tile: int, begin: int, end: int) -> list[tuple[int, int]]:
        return [(tile, i) for i in range(begin, end)]

    outputs, waiting = run(schedule, tiles, lambda a, b: a + b, order)
    if waiting:
        return "hangs"
    written = range(schedule.outputs if schedule.tile_iters else 0)
    expected = {tile: tiles(tile, 0, schedule.tile_iters) for tile in written}
    return "right" if outputs == expected else "wrong"


def lean_attention_basic(
    q: Tensor, k: Tensor, v: Tensor, *, tile_m: int, tile_n: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 2: every tile (i, j) of the scores for itself, then a fold over j for each i."""
    return tile_by_tile(q, k, v, tile_m, tile_n, lambda tiles: reduce(rescale, tiles))


def lean_tile(
    q: Tensor, k: Tensor, v: Tensor, begin: int, end: int, *, tile_n: int, scale: float
) -> State:
    """Algorithm 3: the state of iterations `[begin, end)` of one output tile, not normalised.

    q has the rows of that output tile, k and v all keys of its head.
    """
    state = empty_state(q, v)
    for keys in blocks(end * tile_n, tile_n)[begin:]:
        state = rescale(state, tile_state(q, k[keys], v[keys], scale))
    return state


def lean_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tile_m: int,
    tile_n: int,
    ctas: int,
    schedule: type[AsPrinted] = Balanced,
) -> tuple[Tensor, Tensor]:
    """Algorithm 4: equal ranges of the LeanTiles of all heads and query blocks, on `ctas` workers.

    With as many CTAs as output tiles it is `flash_attention_2`, with s times as many, where s
    divides C_n, `flash_decoding`.

    Args:
        schedule: the index arithmetic, one of `SCHEDULES`.

    Raises:
        RuntimeError: the schedule makes a CTA wait for a part that nobody leaves.
    """
    scale = q.shape[-1] ** -0.5
    q_heads, k_heads, v_heads = (x[None].flatten(0, -3) for x in (q, k, v))
    tiles = [(head, rows) for head in range(len(q_heads)) for rows in blocks(q.shape[-2], tile_m)]

    def part(tile: int, begin: int, end: int) -> State:
        inputs = q_heads[tiles[tile]], k_heads[tiles[tile][0]], v_heads[tiles[tile][0]]
        return lean_tile(*inputs, begin, end, tile_n=tile_n, scale=scale)

    indices = schedule(len(tiles), -(-k.shape[-2] // tile_n), ctas)
    outputs, waiting = run(indices, part, rescale)
    if waiting:
        raise RuntimeError(
            f"lean_attention: schedule must be one whose CTAs all end, got {schedule.__name__}, "
            f"in which CTA {waiting[0]} waits forever"
        )
    o = q.new_zeros(*q_heads.shape[:-1], v.shape[-1])
    lse = q.new_full(q_heads.shape[:-1], float("-inf"))
    for tile, state in outputs.items():
        o[tiles[tile]], lse[tiles[tile]] = normalise(state)
    return o.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1])
