# SPDX-License-Identifier: BSD-3-Clause
"""How often keys come from DRAM where several blocks of rows read them, by the order of the line.

    python -m benchmarks.cuda.line_order            # the table of results/cuda_predicted.md
    python -m benchmarks.cuda.line_order --write    # puts it there

Nothing is measured: workers take a tile each in turn, and the L2 keeps the tiles that were used
last. Each worker is a block of the kernel of most rows, one on a multiprocessor.
"""

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..harness.report import ROOT
from .cases import K
from .predict import H200, OVERHEAD_TILES, PAGE, in_step

BEGIN = "<!-- the table of python -m benchmarks.cuda.line_order --write -->\n"
END = "<!-- its end -->\n"
TILE_KEYS, TILE_BYTES = 64, 32 * K  # bf16, 128 columns: csrc/cuda/decode/tile_config.cuh
L2_BYTES = 40_000_000  # of an H200's 50 MB, for keys and values


@dataclass(frozen=True)
class Shape:
    batch: int
    heads_kv: int
    row_blocks: int
    seqlen_k: int  # that the first block of rows sees
    more_keys: int = 0  # that each following block of rows sees

    @property
    def name(self) -> str:
        tokens = f"{self.seqlen_k // K}k keys" + (f" + {self.more_keys}" if self.more_keys else "")
        return f"{self.batch} x {self.heads_kv} heads, {tokens}, {self.row_blocks} blocks"

    def tiles(self, row_block: int) -> int:
        return -(-(self.seqlen_k + row_block * self.more_keys) // TILE_KEYS)


Output = tuple[int, int, int]  # sequence, kv head, block of rows


def by_heads(shape: Shape) -> Iterator[Output]:
    """All blocks of rows of a head, one after the other."""
    for sequence in range(shape.batch):
        for head in range(shape.heads_kv):
            yield from ((sequence, head, block) for block in range(shape.row_blocks))


def by_sequences(shape: Shape) -> Iterator[Output]:
    for sequence in range(shape.batch):
        for block in range(shape.row_blocks):
            yield from ((sequence, head, block) for head in range(shape.heads_kv))


def by_row_blocks(shape: Shape) -> Iterator[Output]:
    """The order of csrc/cuda/decode/schedule.cuh."""
    for block in range(shape.row_blocks):
        for sequence in range(shape.batch):
            yield from ((sequence, head, block) for head in range(shape.heads_kv))


def reads_of_dram(
    shape: Shape, order: Callable[[Shape], Iterator[Output]], workers: int, l2_bytes: int = L2_BYTES
) -> float:
    """How often each tile comes from DRAM, on average."""
    line: list[tuple[int, int, int] | None] = []
    for sequence, head, block in order(shape):
        line += [None] * OVERHEAD_TILES
        line += [(sequence, head, tile) for tile in range(shape.tiles(block))]
    begins = [worker * len(line) // workers for worker in range(workers + 1)]
    cached: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    missed = 0
    for step in range(-(-len(line) // workers)):
        for worker in range(workers):
            at = begins[worker] + step
            tile = line[at] if at < begins[worker + 1] else None
            if tile is None:
                continue
            missed += tile not in cached
            cached[tile] = None
            cached.move_to_end(tile)
            if len(cached) > l2_bytes // TILE_BYTES:
                cached.popitem(last=False)
    return missed / len(set(line) - {None})


SHAPES = (
    Shape(1, 8, 2, 64 * K),
    Shape(1, 8, 5, 16 * K),
    Shape(8, 8, 2, 16 * K),
    Shape(64, 8, 2, 4 * K),
    Shape(16, 8, 4, 8 * K),
    Shape(1, 8, 32, 16 * K, more_keys=16),
    Shape(4, 8, 8, 8 * K, more_keys=16),
)


def table() -> str:
    """Markdown. The last column is what the kernel does."""
    lines = [
        "| shape | (sequence, head, block) "
        "| (sequence, block, head) | (block, sequence, head) | in step |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    workers = H200.multiprocessors
    for shape in SHAPES:
        orders = by_heads, by_sequences, by_row_blocks
        found = [reads_of_dram(shape, order, workers) for order in orders]
        found.append(reads_of_dram(shape, by_row_blocks, in_step(workers, shape.row_blocks)))
        cells = [shape.name, *(f"{times:.1f}" for times in found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Counts reads of DRAM by the order of the line.")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    if parser.parse_args(arguments).write:
        head, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(head + BEGIN + table() + END + rest.split(END, 1)[1])
    else:
        print(table(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
