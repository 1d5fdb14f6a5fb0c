# SPDX-License-Identifier: BSD-3-Clause
"""Draws the pictures of the page of papers: LeanAttention's Figure 1 and its Algorithm 4.

python -m lab.papers.pictures
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.pictures import FIRST, GROUND, INK, OURS, SECOND, Picture, main, picture
from tree_attention import lean_schedule

from .algorithms.lean import AsPrinted, outcome


def schedules() -> dict[str, list[list[int]]]:
    """Return rows (worker, head, first tile, end) of LeanAttention's Figure 1: 5 tiles a head."""
    lean = lean_schedule(torch.tensor([5, 5], dtype=torch.int32), 5).tolist()
    return {
        "FlashAttention-2: one worker for a head": [[0, 0, 0, 5], [1, 1, 0, 5]],
        "FlashDecoding: a fixed split in two": [
            [0, 0, 0, 3],
            [1, 0, 3, 5],
            [2, 1, 0, 3],
            [3, 1, 3, 5],
        ],
        "LeanAttention: equal shares of the tiles": lean,
    }


OUTPUTS, ITERATIONS, CTAS = (1, 2, 7), 24, 12


def algorithm_4() -> dict[str, list[list[str]]]:
    """Return outcomes of Algorithm 4 by iterations of a tile and CTAs, for numbers of tiles."""
    return {
        str(outputs): [
            [outcome(AsPrinted(outputs, tile, ctas)) for tile in range(1, ITERATIONS + 1)]
            for ctas in range(1, CTAS + 1)
        ]
        for outputs in OUTPUTS
    }


def draw_schedules(path: Path) -> None:
    data = schedules()
    with picture(path, data, (1, 3), (9, 2.9), sharey=True, sharex=True) as (panels,):
        for axes, (name, rows) in zip(panels, data.items(), strict=True):
            clock = [0] * 5
            for worker, head, begin, end in rows:
                for tile in range(begin, end):
                    colour = (OURS, FIRST)[head]
                    axes.barh(worker, 1, left=clock[worker], color=colour, edgecolor=GROUND)
                    middle = clock[worker] + 0.5
                    axes.text(middle, worker, str(tile), ha="center", va="center", color=GROUND)
                    clock[worker] += 1
            axes.axvline(max(clock), color=INK, linestyle="--", linewidth=1)
            axes.text(max(clock) + 0.1, 4.2, f"{max(clock)} tiles", va="center")
            axes.set_title(name.replace(": ", "\n"), fontsize=10)
            axes.set(xlabel="time, in tiles", xlim=(0, 6.2), xticks=range(6))
        panels[0].set_yticks(range(5), [f"worker {i}" for i in range(5)])
        panels[0].invert_yaxis()
        panels[0].figure.suptitle(
            "Two heads of five tiles. The last worker to end decides: fewer tiles are better",
            fontsize=11,
        )


def draw_algorithm_4(path: Path) -> None:
    data = algorithm_4()
    kinds = {"right": OURS, "wrong": FIRST, "hangs": SECOND}
    with picture(path, data, (1, len(data)), (9, 3.7), sharey=True) as (panels,):
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        for axes, (outputs, grid) in zip(panels, data.items(), strict=True):
            axes.pcolormesh(
                range(1, ITERATIONS + 1),
                range(1, CTAS + 1),
                [[list(kinds).index(kind) for kind in row] for row in grid],
                cmap=ListedColormap(list(kinds.values())),
                vmin=0,
                vmax=2,
            )
            axes.set_xticks(range(0, ITERATIONS + 1, 4)[1:])
            axes.set_xticks([i + 0.5 for i in range(ITERATIONS)], minor=True)
            axes.set_yticks([i + 0.5 for i in range(CTAS)], minor=True)
            axes.grid(which="minor", color=GROUND, linewidth=0.6)
            axes.tick_params(which="minor", length=0)
            axes.set(xlabel="iterations of a tile")
            axes.set_title(f"{outputs} output tile{'s' * (outputs != '1')}", fontsize=11)
        panels[0].set(ylabel="CTAs", yticks=range(2, CTAS + 1, 2))
        handles = [Patch(color=colour, label=kind) for kind, colour in kinds.items()]
        panels[0].figure.suptitle(
            "LeanAttention's Algorithm 4 as printed, by problem size. CTAs: blocks of threads",
            fontsize=11,
        )
        panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


PICTURES = {
    "lean_schedule.svg": Picture(schedules, draw_schedules),
    "algorithm_4.svg": Picture(algorithm_4, draw_algorithm_4, ("algorithm_4",)),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PICTURES, Path(__file__).parent, __doc__))
