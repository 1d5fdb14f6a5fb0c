# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of the study: the shapes of the paper's figures 3 and 4, and the strategies by ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..harness.plots import picture
from .headlines import FIGURE_3, FIGURE_3_KEYS
from .rings import RING
from .steps import methods

Rows = Sequence[dict[str, Any]]


def draw_contexts(rows: Rows, path: Path) -> None:
    """Tree and ring by context, in the paper's worlds."""

    def panel(axes: Any, of_cluster: Rows) -> None:
        for i, world_size in enumerate(FIGURE_3):
            of_world = [row for row in of_cluster if row["world_size"] == world_size]
            keys = [row["keys"] for row in of_world]
            for method, line in (("best", "-o"), (RING, "--s")):
                times = [1e3 * _seconds(row, method) for row in of_world]
                label = f"{'best tree' if method == 'best' else method}, {world_size} ranks"
                axes.plot(keys, times, line, color=f"C{i}", markersize=4, label=label)

    title = "Decoding steps by context: 16 heads of 128, one sequence, bfloat16"
    _panels(rows, path, title, ("keys of all ranks", "milliseconds"), panel)


def draw_strategies(rows: Rows, path: Path) -> None:
    """What is not attention, by ranks."""

    def panel(axes: Any, of_cluster: Rows) -> None:
        longest = [row for row in of_cluster if row["keys"] == FIGURE_3_KEYS]
        worlds = [row["world_size"] for row in longest]
        for i, method in enumerate(method for method in methods() if method != RING):
            times = [
                1e6 * (row["methods"][method]["seconds"] - row["attention_seconds"])
                for row in longest
            ]
            axes.plot(worlds, times, "-o", color=f"C{i}", markersize=4, label=method)

    title = f"Decoding steps over {FIGURE_3_KEYS:,} keys without their attention"
    _panels(rows, path, title, ("ranks", "microseconds"), panel)


def _panels(
    rows: Rows,
    path: Path,
    title: str,
    axis_labels: tuple[str, str],
    panel: Callable[[Any, Rows], None],
) -> None:
    """A panel for each cluster, with one legend for all."""
    names = list(dict.fromkeys(row["cluster"] for row in rows))
    num_columns = min(3, len(names))
    num_rows = -(-len(names) // num_columns)
    size = (4.6 * num_columns, 3.9 * num_rows + 0.8)
    rect = (0, 0.6 / size[1], 1, 1)  # below is the legend
    with picture(path, size, (num_rows, num_columns), title, rect) as grid:
        for name, axes in zip(names, grid.flat, strict=False):
            panel(axes, [row for row in rows if row["cluster"] == name and row["batch"] == 1])
            axes.set(xscale="log", yscale="log", xlabel=axis_labels[0], ylabel=axis_labels[1])
            axes.set_title(name, loc="left")
            axes.grid(alpha=0.3)
        for axes in grid.flat[len(names) :]:
            axes.remove()
        handles, labels = grid.flat[0].get_legend_handles_labels()
        grid.flat[0].figure.legend(
            handles, labels, loc="lower center", ncols=min(4, num_columns + 1)
        )


def _of(row: dict[str, Any], method: str) -> dict[str, Any]:
    result: dict[str, Any] = row["methods"][row["best"] if method == "best" else method]
    return result


def _seconds(row: dict[str, Any], method: str) -> float:
    return float(_of(row, method)["seconds"])
