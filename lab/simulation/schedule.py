# SPDX-License-Identifier: BSD-3-Clause
"""Decode attention on one GPU by arithmetic: which block reads which keys, and when the last one
ends.

A multiprocessor (SM) reads LeanTiles of keys and values at its share of the memory's bandwidth.
Blocks start in the order of the grid, each on the SM that has least to do. Beside the tiles there
are kernels to launch, queries to load for every output that a block works on, and parts to merge.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tree_attention.planning.machines import MACHINES

from .fabric import Floats, Ints


@dataclass(frozen=True)
class Gpu:
    """A GPU as a schedule sees it."""

    name: str
    multiprocessors: int
    bandwidth: float  # bytes per second
    resident: int = 2  # blocks at once on an SM


def gpu_of(name: str) -> Gpu:
    machine = MACHINES[name.lower()]
    return Gpu(name, machine.multiprocessors, machine.memory_bandwidth)


@dataclass(frozen=True)
class Costs:
    """Seconds beside those of the tiles."""

    launch: float  # of a kernel
    output: float  # of a block for every output that it works on, and of the first part merged
    merge: float  # of every further part of an output
    # The share of an SM's rate that a block reaches which is alone on it.
    lone: float = 1.0


TILES = Costs(0.0, 0.0, 0.0)
# Assumptions: a kernel that waits for another one, as in clusters.py; a load from memory that waits
# for another one, twice; half a kilobyte of a part from the L2 cache while others are on their way.
ASSUMED = Costs(launch=3e-6, output=1.5e-6, merge=0.05e-6)


@dataclass(frozen=True)
class Work:
    """One query token for each sequence of a batch."""

    keys: tuple[int, ...]  # of each sequence
    heads: int  # outputs of each sequence: the query heads of a group are one
    head_dim: int = 64
    itemsize: int = 2

    @property
    def tile_keys(self) -> int:
        """LeanAttention's sweep on an A100; FlashDecoding's blocks have as many."""
        return 256 if self.head_dim <= 64 else 128

    @property
    def tiles(self) -> Ints:
        """LeanTiles of every output, in the order of batch and heads."""
        return np.repeat(-(-np.array(self.keys) // self.tile_keys), self.heads)

    @property
    def tile_bytes(self) -> int:
        return 2 * self.tile_keys * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Schedule:
    blocks: Ints  # tiles of every block, in the order of the grid
    outputs: Ints  # on which every block works
    parts: int  # of the output that has most
    kernels: int = 1

    def occupancy(self, gpu: Gpu) -> float:
        """The share of their time in which SMs read tiles, until the last one ends."""
        longest = makespan(self.blocks.astype(float), gpu.multiprocessors)
        return float(self.blocks.sum()) / (gpu.multiprocessors * longest)

    def seconds(self, work: Work, gpu: Gpu, costs: Costs) -> float:
        is_lone = np.count_nonzero(self.blocks) <= gpu.multiprocessors
        rate = gpu.bandwidth / gpu.multiprocessors * (costs.lone if is_lone else 1.0)
        blocks = self.blocks * (work.tile_bytes / rate) + self.outputs * costs.output
        merging = costs.output + (self.parts - 1) * costs.merge if self.parts > 1 else 0.0
        longest = makespan(blocks, gpu.multiprocessors)
        return self.kernels * costs.launch + longest + merging


def makespan(blocks: Floats, multiprocessors: int) -> float:
    """Return when the last block ends, of blocks that take so long each."""
    if (blocks == blocks[0]).all():
        return float(-(-len(blocks) // multiprocessors) * blocks[0])
    ends = [0.0] * multiprocessors
    for seconds in blocks.tolist():
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


# A schedule is made for what the host knows when it launches (the second argument), which may be
# longer than what there is: in a captured graph it is the room that a cache has.
Scheduler = Callable[[Work, Work, Gpu, Costs], Schedule]


def flash_attention_2(work: Work, known: Work, gpu: Gpu, costs: Costs) -> Schedule:
    """A block for each output."""
    return fixed_split(work, 1)


def fixed_split(work: Work, splits: int) -> Schedule:
    """As many parts of every output, as long as each other, and a kernel that merges them."""
    tiles = work.tiles[:, None]
    length = -(-tiles // splits)
    blocks = np.clip(tiles - length * np.arange(splits), 0, length).ravel()
    return Schedule(blocks, np.ones_like(blocks), splits, 1 + (splits > 1))


def flash_decoding(work: Work, known: Work, gpu: Gpu, costs: Costs) -> Schedule:
    """FlashAttention 2.5's rule: one part if outputs fill 80 % of the SMs, else the least number of
    parts, of at most 128, whose last wave is 85 % as full as the best number's."""
    outputs, tiles = len(known.tiles), int(known.tiles.max())
    if outputs >= 0.8 * gpu.multiprocessors:
        return fixed_split(work, 1)
    numbers = _useful_splits(tiles, min(128, gpu.multiprocessors, tiles))
    waves = outputs * numbers / gpu.multiprocessors
    efficiency = waves / np.ceil(waves)
    enough = numbers[efficiency >= 0.85 * efficiency.max()]
    return fixed_split(work, int(enough[0]))


def best_fixed_split(work: Work, known: Work, gpu: Gpu, costs: Costs) -> Schedule:
    """The number of parts, of at most 128, that takes least time for what is known."""
    tiles = int(known.tiles.max())
    numbers = _useful_splits(tiles, min(128, tiles))

    def seconds(splits: Ints) -> float:
        return fixed_split(known, int(splits)).seconds(known, gpu, costs)

    return fixed_split(work, int(min(numbers, key=seconds)))


def _useful_splits(tiles: int, limit: int) -> Ints:
    """Numbers of parts whose longest is shorter than that of one part less."""
    numbers = np.arange(1, limit + 1)
    longest = -(-tiles // numbers)
    useful = np.ones(limit, dtype=bool)
    useful[1:] = longest[1:] < longest[:-1]
    return numbers[useful]


def flash_infer(work: Work, known: Work, gpu: Gpu, costs: Costs) -> Schedule:
    """FlashInfer's plan: parts of one length, the shortest whose blocks all fit at once."""
    room = gpu.resident * gpu.multiprocessors
    known_tiles, tiles = known.tiles, work.tiles
    if len(known_tiles) >= room:
        return fixed_split(work, 1)
    low, high = 1, int(known_tiles.max())
    while low < high:
        middle = (low + high) // 2
        if int((-(-known_tiles // middle)).sum()) > room:
            low = middle + 1
        else:
            high = middle
    numbers = np.maximum(1, -(-tiles // low))
    index = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    blocks = np.clip(np.repeat(tiles, numbers) - low * index, 0, low)
    most = int(numbers.max())
    return Schedule(blocks, np.ones_like(blocks), most, 1 + (most > 1))


def stream_k(work: Work, workers: int) -> Schedule:
    """All tiles end to end, cut into equal runs. Who shares an output merges it in the same kernel,
    and lengths are read on the device."""
    ends = np.cumsum(work.tiles)
    workers = min(workers, int(ends[-1]))
    cuts = np.arange(workers + 1) * ends[-1] // workers
    first = np.searchsorted(ends, cuts[:-1], side="right")
    last = np.searchsorted(ends, cuts[1:], side="left")
    owners = np.searchsorted(cuts, np.stack([ends - work.tiles, ends - 1]), side="right")
    return Schedule(np.diff(cuts), last - first + 1, int((owners[1] - owners[0] + 1).max()))


def lean(work: Work, known: Work, gpu: Gpu, costs: Costs) -> Schedule:
    """Stream-K with the grid that takes least time for what is known, all of it resident."""

    def seconds(workers: int) -> float:
        return stream_k(known, workers).seconds(known, gpu, costs)

    grids = [gpu.multiprocessors * (1 + i) for i in range(gpu.resident)]
    return stream_k(work, min(grids, key=seconds))


FLASH_ATTENTION_2, FLASH_DECODING = "FlashAttention-2", "FlashDecoding"
FLASH_INFER, BEST_SPLIT, LEAN = "FlashInfer", "best fixed split", "LeanAttention"
SCHEDULERS: dict[str, Scheduler] = {
    FLASH_ATTENTION_2: flash_attention_2,
    FLASH_DECODING: flash_decoding,
    FLASH_INFER: flash_infer,
    BEST_SPLIT: best_fixed_split,
    LEAN: lean,
}


def schedules(
    work: Work, gpu: Gpu, costs: Costs = TILES, known: Work | None = None
) -> dict[str, Schedule]:
    return {name: make(work, known or work, gpu, costs) for name, make in SCHEDULERS.items()}


def ratios_to_lean(
    work: Work, gpu: Gpu, costs: Costs, known: Work | None = None
) -> dict[str, float]:
    """Return the times of all schedules over that of LeanAttention."""
    seconds = {
        name: schedule.seconds(work, gpu, costs)
        for name, schedule in schedules(work, gpu, costs, known).items()
    }
    return {name: value / seconds[LEAN] for name, value in seconds.items()}


def uniform(keys: int, heads: int, batch: int = 1, gpus: int = 1, head_dim: int = 64) -> Work:
    """Sequences of one length, the heads dealt to so many GPUs: what each has."""
    if heads % gpus:
        raise ValueError(f"{heads} heads cannot be dealt equally to {gpus} GPUs")
    return Work((keys,) * batch, heads // gpus, head_dim)


def mean_lone_share(cases: Sequence[tuple[Work, float]], gpu: Gpu) -> float:
    """Return the `Costs.lone` that explains speedups over FlashAttention-2 best, geometrically."""
    logs = [
        np.log(ratios_to_lean(work, gpu, TILES)[FLASH_ATTENTION_2] / published)
        for work, published in cases
    ]
    return float(np.exp(np.mean(logs)))
