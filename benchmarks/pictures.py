# SPDX-License-Identifier: BSD-3-Clause
"""Draws the pictures of README.md and docs/ from the tables in benchmarks/results.

    python benchmarks/pictures.py

Points are rows of those tables: run the programs that measure, then this one. Every PNG carries a
digest of what it shows, and `tests/benchmarks/test_pictures.py` compares it with the tables of
today. Memory and schedules are computed and not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.picture_values import (
    CLUSTERS,
    CONTEXT,
    CTAS,
    ITERATIONS,
    MODEL,
    RANKS,
    Line,
    algorithm_4,
    cache_memory,
    contexts,
    schedules,
    tokens,
    two_ranks,
)
from benchmarks.harness.results import digest

DOCS = Path(__file__).parents[1] / "docs"

# Colours that differ in lightness too: ours, and what stands beside it.
OURS, FIRST, SECOND, THIRD, GREY = "#1f5fa8", "#e08a2e", "#b03a48", "#6b8f3c", "#9aa4b0"
DARK_GREY = "#5f6873"
K = 1024


@contextmanager
def picture(
    path: Path, data: Any, grid: tuple[int, int], size: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """Axes `[rows, columns]` of a PNG that is 1,800 pixels wide and carries the digest of data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            *grid, figsize=size, squeeze=False, layout="constrained", **options
        )
        yield axes
        figure.savefig(path, dpi=1800 / size[0], metadata={"Comment": digest(data)})
        pyplot.close(figure)


@dataclass(frozen=True)
class Style:
    """Style of a curve, and the place of its name from its last point."""

    color: str
    name_at: tuple[int, int] = (8, 0)
    linestyle: str = "-"
    marker: str = "o"


def draw_lines(axes: Any, lines: dict[str, Line], styles: dict[str, Style]) -> None:
    """Draw curves over a context in powers of two, each named at its last point."""
    for name, points in lines.items():
        xs, ys = zip(*points, strict=True)
        style = styles[name]
        axes.plot(
            xs, ys, linewidth=2, color=style.color, linestyle=style.linestyle, marker=style.marker
        )
        axes.annotate(
            name,
            (xs[-1], ys[-1]),
            xytext=style.name_at,
            textcoords="offset points",
            color=style.color,
            va="center",
        )
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x / K:,.0f}k" if x < K * K else f"{x / K / K:.0f}M" for x in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def draw_tokens(path: Path) -> None:
    data = tokens()
    styles = {
        "ours": Style(OURS, (8, -2)),
        "HuggingFace, DynamicCache": Style(SECOND),
        "HuggingFace, StaticCache": Style(FIRST),
        "vLLM": Style(THIRD, (8, -5)),
        "OpenVINO": Style(DARK_GREY, (8, 6)),
    }
    with picture(path, data, (1, 2), (9, 3.6)) as ((left, right),):
        for axes, (model, lines) in zip((left, right), data.items(), strict=True):
            draw_lines(axes, lines, styles)
            axes.set(
                xlabel="keys in the cache",
                ylim=(0, 1.08 * max(y for line in lines.values() for _, y in line)),
            )
            axes.set_title(f"1B-shaped Llama, {model}", fontsize=11)
        left.set_ylabel("ms per token")
        left.set_xlim(right=65536 * 12)
        right.set_xlim(right=16384 * 3)


def draw_contexts(path: Path) -> None:
    data = contexts()
    styles = {
        "ours": Style(OURS, (8, -8)),
        "pass-Q": Style(THIRD, (8, 6)),
        "ring": Style(SECOND, (8, 2)),
        "ring at line rate": Style(SECOND, (8, -4), ":", ""),
    }
    with picture(path, data, (1, 2), (9, 3.6), sharey=True) as (both,):
        for axes, (cluster, lines) in zip(both, data.items(), strict=True):
            draw_lines(axes, lines, styles)
            axes.set(xlabel="keys per rank", yscale="log")
            axes.set_title(CLUSTERS[cluster], fontsize=11)
            axes.set_xlim(right=max(x for x, _ in lines["ours"]) * 11)
            axes.set_yticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
            axes.minorticks_off()
        both[0].set_ylabel("ms of a step")


def draw_two_ranks(path: Path) -> None:
    data = two_ranks()
    titles = {"bare": "on one host, two cores", "lan": "on two hosts, 0.1 ms and 10 Gb/s"}
    ratios = {"width_ratios": [len(forms) for forms in data.values()]}
    with picture(path, data, (1, len(data)), (9, 3.6), sharey=True, gridspec_kw=ratios) as (
        panels,
    ):
        for axes, (place, forms) in zip(panels, data.items(), strict=True):
            for offset, (index, what, colour) in enumerate(
                ((0, "prompt", FIRST), (1, "token", OURS))
            ):
                heights = [points[0][index] for points in forms.values()]
                bars = axes.bar(
                    [i + 0.4 * offset - 0.2 for i in range(len(forms))],
                    heights,
                    0.38,
                    color=colour,
                    label=what,
                )
                axes.bar_label(bars, fmt="%.2f", fontsize=9, padding=-13, color="white")
            axes.axhline(2, color="black", linestyle="--", linewidth=1)
            axes.axhline(1, color=GREY, linewidth=1, zorder=0)
            axes.set_xticks(range(len(forms)), list(forms), fontsize=9)
            axes.set_title(titles[place], fontsize=11)
        panels[0].set_ylabel("times one thread")
        panels[0].set_ylim(0, 2.35)
        panels[-1].text(2.4, 2.03, "ideal", ha="right")
        panels[0].legend(loc="upper right", ncols=2, frameon=False)


def draw_cache_memory(path: Path) -> None:
    data = cache_memory()
    with picture(path, data, (1, 1), (9, 3.8)) as ((axes,),):
        for offset, (dtype, colour) in enumerate((("bf16", OURS), ("int8", FIRST))):
            xs = [i + 0.4 * offset - 0.2 for i in range(len(RANKS))]
            axes.bar(xs, data["weights"], 0.38, color=GREY, label=None if offset else "weights")
            bars = axes.bar(
                xs, data[dtype], 0.38, data["weights"], color=colour, label=f"cache in {dtype}"
            )
            sums = [a + b for a, b in zip(data["weights"], data[dtype], strict=True)]
            axes.bar_label(bars, [f"{x:.0f}" for x in sums], fontsize=10, padding=3)
        axes.axhline(80, color="black", linestyle="--", linewidth=1)
        axes.text(len(RANKS) - 0.5, 83, "a GPU of 80 GB", ha="right")
        axes.set_xticks(range(len(RANKS)), [f"{p} ranks" for p in RANKS])
        axes.set(ylabel="GB on each rank")
        axes.set_title(f"{MODEL.name}, {CONTEXT:,} tokens, weights split", fontsize=11)
        axes.legend(frameon=False)


def draw_schedules(path: Path) -> None:
    data = schedules()
    with picture(path, data, (1, 3), (9, 2.6), sharey=True, sharex=True) as (panels,):
        for axes, (name, rows) in zip(panels, data.items(), strict=True):
            clock = [0] * 5
            for worker, head, begin, end in rows:
                for tile in range(begin, end):
                    colour = (OURS, FIRST)[head]
                    axes.barh(worker, 1, left=clock[worker], color=colour, edgecolor="white")
                    middle = clock[worker] + 0.5
                    axes.text(middle, worker, str(tile), ha="center", va="center", color="white")
                    clock[worker] += 1
            axes.axvline(max(clock), color="black", linestyle="--", linewidth=1)
            axes.text(max(clock) + 0.1, 4.2, f"{max(clock)} tiles", va="center")
            axes.set_title(name.replace(": ", "\n").replace(", ", "\n"), fontsize=10)
            axes.set(xlabel="time, in tiles", xlim=(0, 6.2), xticks=range(6))
        panels[0].set_yticks(range(5), [f"worker {i}" for i in range(5)])
        panels[0].invert_yaxis()


def draw_algorithm_4(path: Path) -> None:
    data = algorithm_4()
    kinds = {"right": OURS, "wrong": FIRST, "hangs": SECOND}
    with picture(path, data, (1, len(data)), (9, 3.4), sharey=True) as (panels,):
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        for axes, (outputs, grid) in zip(panels, data.items(), strict=True):
            axes.imshow(
                [[list(kinds).index(kind) for kind in row] for row in grid],
                cmap=ListedColormap(list(kinds.values())),
                vmin=0,
                vmax=2,
                origin="lower",
                extent=(0.5, ITERATIONS + 0.5, 0.5, CTAS + 0.5),
                aspect="auto",
            )
            axes.set_xticks(range(0, ITERATIONS + 1, 4)[1:])
            axes.set_xticks([i + 0.5 for i in range(ITERATIONS)], minor=True)
            axes.set_yticks([i + 0.5 for i in range(CTAS)], minor=True)
            axes.grid(which="minor", color="white", linewidth=0.6)
            axes.tick_params(which="minor", length=0)
            axes.set(xlabel="iterations of a tile")
            axes.set_title(f"{outputs} output tile{'s' * (outputs != '1')}", fontsize=11)
        panels[0].set(ylabel="CTAs", yticks=range(2, CTAS + 1, 2))
        handles = [Patch(color=colour, label=kind) for kind, colour in kinds.items()]
        panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


@dataclass(frozen=True)
class Picture:
    """A file of docs/, what it shows, how it is drawn, and the results that it is drawn from."""

    values: Callable[[], Any]
    draw: Callable[[Path], None]
    results: tuple[str, ...] = ()


PICTURES = {
    "tokens.png": Picture(tokens, draw_tokens, ("llama", "engines")),
    "contexts.png": Picture(contexts, draw_contexts, ("contexts",)),
    "two_ranks.png": Picture(two_ranks, draw_two_ranks, ("scaling",)),
    "cache_memory.png": Picture(cache_memory, draw_cache_memory),
    "lean_schedule.png": Picture(schedules, draw_schedules),
    "algorithm_4.png": Picture(algorithm_4, draw_algorithm_4, ("algorithm_4",)),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(PICTURES)}; all by default")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR", help="(default docs)")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.names) - PICTURES.keys():
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    parsed.out.mkdir(parents=True, exist_ok=True)
    for name in parsed.names or PICTURES:
        PICTURES[name].draw(parsed.out / name)
        print(parsed.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
