# SPDX-License-Identifier: BSD-3-Clause
"""Pictures, drawn without a display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(
    path: Path,
    size: tuple[float, float],
    grid: tuple[int, int] = (1, 1),
    title: str = "",
    rect: tuple[float, float, float, float] = (0, 0, 1, 1),
    **options: Any,
) -> Iterator[Any]:
    """The axes `[rows, columns]` of a figure, which is written to `path` at the end of the block.

    `rect` is the part of the figure that the axes fill; `options` are those of pyplot.subplots.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, figsize=size, squeeze=False, **options)
    yield axes
    if title:
        figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=rect)
    figure.savefig(path, dpi=1800 / size[0])
    pyplot.close(figure)
