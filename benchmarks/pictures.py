# SPDX-License-Identifier: BSD-3-Clause
"""Draws the pictures of README.md and docs/ from the tables in benchmarks/results and numerics.md.

    python benchmarks/pictures.py

Points are rows of those tables: run the programs that measure, then this one. Every SVG carries a
digest of what it shows, and `tests/benchmarks/test_pictures.py` compares it with the tables of
today. Memory is computed and not measured. A browser in dark mode shows the colours of `DARK`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.regions import END, mark
from benchmarks.harness.results import digest, number, read_table
from tree_attention.planning.arithmetic import SPLIT_BY_HEADS, Split, Work
from tree_attention.planning.models import NAMED

DOCS = Path(__file__).parents[1] / "docs"

# Colours that differ in lightness too: of this library, and of what it is compared with.
OURS, FIRST, SECOND, THIRD, GREY = "#1f5fa8", "#e08a2e", "#b03a48", "#6b8f3c", "#9aa4b0"
DARK_GREY, LIGHT_GREY = "#5f6873", "#ececec"
INK, GROUND = "#222233", "#ffffff"  # of texts and axes, and under them
# What a browser in dark mode shows in the place of each of these.
DARK = {
    OURS: "#6cb0ff",
    FIRST: "#f0a04b",
    SECOND: "#f47c8a",
    THIRD: "#9cc465",
    GREY: "#75808c",
    DARK_GREY: "#aab5c0",
    LIGHT_GREY: "#2d333b",
    INK: "#e6edf3",
    GROUND: "#161b22",
}
K = 1024

Line = list[tuple[float, float]]  # points (x, y) in the order of x


def tokens() -> dict[str, dict[str, Line]]:
    """Return ms per token by context: HuggingFace's caches, other engines, and ours."""
    names = {
        "sdpa, DynamicCache": "HuggingFace, DynamicCache",
        "sdpa, StaticCache": "HuggingFace, StaticCache",
        "tree_attention, world 1": "tree_attention",
    }
    engines = {"ours": "tree_attention", "vllm": "vLLM", "openvino": "OpenVINO"}
    models: dict[str, dict[str, Line]] = {"8 of 16 layers": {}, "4 of 16 layers": {}}
    for row in read_table("llama").rows:
        if name := names.get(row["method"]):
            point = number(row["context"]), number(row["ms /token"])
            models["8 of 16 layers"].setdefault(name, []).append(point)
    for row in read_table("engines").rows:
        if name := engines.get(row["engine"]):
            point = number(row["context"]), number(row["decode ms"])
            models["4 of 16 layers"].setdefault(name, []).append(point)
    return models


CLUSTERS = {
    "lan p=4": "4 emulated hosts, links of 0.1 ms, 10 Gb/s",
    "metro p=8": "8 emulated hosts, links of 1 ms, 1 Gb/s",
}
KEYS, QUERIES = "keys passed\naround a ring", "queries passed\naround a ring"
AT_LINE_RATE = "the same at the\nlink's full rate,\ncalculated"
XEON = "an Intel Xeon without AMX, bfloat16. Lower is better"


def contexts() -> dict[str, dict[str, Line]]:
    """Return ms per step by keys per rank: of this library, of rings of queries and of keys, and
    of keys at line rate."""
    table = read_table("contexts")
    clusters: dict[str, dict[str, Line]] = {}
    for cluster in CLUSTERS:
        methods: dict[str, Line] = {}
        for row in table.rows:
            found = re.fullmatch(rf"{cluster} B=1 n=(\d+)", row["case"])
            if found:
                name = {"ring": KEYS, "ring, passing queries": QUERIES}.get(row["method"])
                point = float(found[1]), number(row["ms"])
                methods.setdefault(name or "tree_attention", []).append(point)
        place = cluster.replace(" p=", "/")
        (note,) = (x for x in table.notes if x.startswith(f"{place}: ring / tree"))
        rate = {
            float(keys.replace(",", "")): float(ratio.replace(",", ""))
            for ratio, keys in re.findall(r"([\d.,]+) at ([\d,]*\d)", note.split("line rate: ")[1])
        }
        methods[AT_LINE_RATE] = [(n, ms * rate[n]) for n, ms in methods["tree_attention"]]
        clusters[cluster] = methods
    return clusters


SCORES = {
    "flat": "flat scores:\nall keys count",
    "normal": "normal scores",
    "peaked": "peaked scores:\nfew keys count",
}
ERRORS = {"tree_attention": "-", "plain": "--"}


def numerics() -> dict[str, dict[str, Line]]:
    """Return errors by keys for each kind of scores, dtype and library: the table of
    docs/numerics.md, which scripts/numerics.py writes."""
    table = (DOCS / "numerics.md").read_text().split(mark("scripts/numerics.py"))[1]
    head, _, *rows = (
        [x.strip() for x in line.split("|")[1:-1]]
        for line in table.split(END)[0].splitlines()
        if line.startswith("|")
    )
    found: dict[str, dict[str, Line]] = {name: {} for name in SCORES}
    for row in (dict(zip(head, cells, strict=True)) for cells in rows):
        for column, text in row.items():
            if column.partition(": ")[2] in ERRORS and not column.startswith("lse"):
                point = number(row["keys"]), float(text)
                found[row["scores"]].setdefault(column, []).append(point)
    return found


FORMS = {
    "1 process, 2 threads": "one process,\ntwo threads",
    "weights whole, prompt split": "two ranks,\nreplicated weights",
    "weights split, tensor_parallel_size 1": "two ranks,\nweights split",
    "weights split, tensor_parallel_size 2": "two ranks,\nweights and\nheads split",
}


def two_ranks() -> dict[str, dict[str, Line]]:
    """Return gains over one process with one thread by place: (prompt, token) of each form."""
    rows = read_table("scaling").rows
    (one,) = (row for row in rows if row["form"] == "1 process, 1 thread")
    places: dict[str, dict[str, Line]] = {}
    for row in rows:
        place = row["place/ranks"].split("/")[0]
        if row["form"] in FORMS:
            gains = [number(one[key]) / number(row[key]) for key in ("prefill s", "ms /token")]
            places.setdefault(place, {})[FORMS[row["form"]]] = [(gains[0], gains[1])]
    return places


MODEL, CONTEXT, RANKS = NAMED["llama-3.1-70b"], 1 << 20, (2, 4, 8, 16, 32)
# GB of memory that ranks may have, as lines.
HOSTS = {80: "a GPU with 80 GB", 128: "a host with 128 GB", 256: "a host with 256 GB"}


def cache_memory() -> dict[str, list[float]]:
    """Return GB on each of so many ranks: weights in bf16, and the cache in bf16 and int8."""
    work = Work(context=CONTEXT)
    shapes = {name: replace(MODEL, kv_dtype=name) for name in ("bf16", "int8")}
    return {
        "weights": [Split(MODEL, SPLIT_BY_HEADS, p, work).weights_bytes / 1e9 for p in RANKS],
        **{
            name: [Split(shape, SPLIT_BY_HEADS, p, work).cache_bytes / 1e9 for p in RANKS]
            for name, shape in shapes.items()
        },
    }


@contextmanager
def picture(
    path: Path, data: Any, grid: tuple[int, int], size: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """Axes `[rows, columns]` of an SVG that carries the digest of data and colours of dark mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = dict.fromkeys(ink, INK)
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), GROUND)
    style |= {"grid.color": GREY, "svg.hashsalt": path.name, "font.size": 11}
    with pyplot.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            *grid, figsize=size, squeeze=False, layout="constrained", **options
        )
        yield axes
        figure.savefig(path, metadata={"Description": digest(data), "Date": None, "Creator": None})
        pyplot.close(figure)
    path.write_text(with_dark_mode(path.read_text()))


def with_dark_mode(svg: str) -> str:
    """Return a picture of matplotlib, which gives each element its colours in `style`, with a rule
    for each of them."""
    rules = "".join(
        f'[style*="{name}: {light}"] {{ {name}: {dark} !important; }}\n'
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
        if f"{name}: {light}" in svg
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}}}</style>\n"
    return svg.replace("<defs>", f"{style}<defs>", 1)


def digest_of(path: Path) -> str:
    """Return the digest of what a picture shows."""
    (found,) = re.findall(r"<dc:description>(\w+)</dc:description>", path.read_text())
    return found


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
        "tree_attention": Style(OURS, (8, -2)),
        "HuggingFace, DynamicCache": Style(SECOND),
        "HuggingFace, StaticCache": Style(FIRST),
        "vLLM": Style(THIRD, (8, -5)),
        "OpenVINO": Style(DARK_GREY, (8, 6)),
    }
    with picture(path, data, (1, 2), (9, 3.6)) as ((left, right),):
        for axes, (model, lines) in zip((left, right), data.items(), strict=True):
            draw_lines(axes, lines, styles)
            axes.set(
                xlabel="tokens in the cache",
                ylim=(0, 1.08 * max(y for line in lines.values() for _, y in line)),
            )
            axes.set_title(f"shape of Llama 3.2 1B, {model}", fontsize=11)
        left.set_ylabel("ms per new token")
        left.figure.suptitle(f"One process on two cores of {XEON}", fontsize=11)
        left.set_xlim(right=65536 * 12)
        right.set_xlim(right=16384 * 3)


def draw_contexts(path: Path) -> None:
    data = contexts()
    styles = {
        "tree_attention": Style(OURS, (8, -12)),
        QUERIES: Style(THIRD, (8, 12)),
        KEYS: Style(SECOND, (8, 6)),
        AT_LINE_RATE: Style(SECOND, (8, -21), ":", ""),
    }
    with picture(path, data, (1, 2), (9, 4), sharey=True) as (both,):
        for axes, (cluster, lines) in zip(both, data.items(), strict=True):
            draw_lines(axes, lines, styles)
            axes.set(xlabel="cached tokens on each host", yscale="log", ylim=(1, 90_000))
            axes.set_title(CLUSTERS[cluster], fontsize=11)
            axes.set_xlim(right=max(x for x, _ in lines["tree_attention"]) * 24)
            axes.set_yticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
            axes.minorticks_off()
        both[0].set_ylabel("ms per attention step, log scale")
        both[0].figure.suptitle(f"Attention for one new token on {XEON}", fontsize=11)


def draw_numerics(path: Path) -> None:
    data = numerics()
    colours = {"float32": OURS, "bfloat16": FIRST, "float16": THIRD}
    with picture(path, data, (1, 3), (9, 4), sharey=True) as (panels,):
        for axes, (scores, lines) in zip(panels, data.items(), strict=True):
            for column, points in lines.items():
                dtype, _, library = column.partition(": ")
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, ERRORS[library], color=colours[dtype], label=column, linewidth=2)
            axes.set(xlabel="number of keys", yscale="log")
            axes.set_xscale("log", base=2)
            axes.set_xticks([K, 16 * K, 256 * K], ["1k", "16k", "256k"])
            axes.set_title(SCORES[scores], fontsize=11)
            axes.minorticks_off()
            axes.grid(alpha=0.25)
        panels[0].set_ylabel("largest error,\nrelative to the row's largest value")
        panels[0].figure.suptitle(
            "Errors against float64 on an Intel Xeon with AMX; tree_attention: the worst of 1 to "
            "64 shards. Lower is better",
            fontsize=10,
        )
        handles, names = panels[0].get_legend_handles_labels()
        names = [name.replace(": plain", ": plain PyTorch") for name in names]
        panels[0].figure.legend(
            handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9
        )


def draw_two_ranks(path: Path) -> None:
    data = two_ranks()
    titles = {
        "bare": "one host",
        "lan": "two emulated hosts, 0.1 ms, 10 Gb/s",
    }
    ratios = {"width_ratios": [len(forms) for forms in data.values()]}
    with picture(path, data, (1, len(data)), (9, 3.6), sharey=True, gridspec_kw=ratios) as (
        panels,
    ):
        for axes, (place, forms) in zip(panels, data.items(), strict=True):
            for offset, (index, what, colour) in enumerate(
                ((0, "reading the prompt", FIRST), (1, "new tokens", OURS))
            ):
                heights = [points[0][index] for points in forms.values()]
                bars = axes.bar(
                    [i + 0.4 * offset - 0.2 for i in range(len(forms))],
                    heights,
                    0.38,
                    color=colour,
                    label=what,
                )
                axes.bar_label(bars, fmt="%.2f", fontsize=9, padding=-13, color=GROUND)
            axes.axhline(2, color=INK, linestyle="--", linewidth=1)
            axes.axhline(1, color=GREY, linewidth=1, zorder=0)
            axes.set_xticks(range(len(forms)), list(forms), fontsize=9)
            axes.set_title(titles[place], fontsize=11)
        panels[0].set_ylabel("speed-up over one thread")
        panels[0].figure.suptitle(
            "Two cores of an Intel Xeon without AMX, bfloat16. Higher is better, two is ideal",
            fontsize=11,
        )
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
            axes.bar_label(
                bars,
                [f"{x:.0f}" for x in sums],
                fontsize=10,
                padding=4,
                bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 0.8},
            )
        for memory, name in HOSTS.items():
            axes.axhline(memory, color=INK, linestyle="--", linewidth=1, zorder=0)
            axes.text(len(RANKS) - 0.5, memory + 3, name, ha="right")
        axes.set_xticks(range(len(RANKS)), [f"{p} ranks" for p in RANKS])
        axes.set(ylabel="GB on each rank")
        axes.set_title(
            f"Estimate: {MODEL.name}, {CONTEXT:,} tokens, weights and cache split. Lower is better",
            fontsize=11,
        )
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.85))
        axes.set_ylim(0, 290)


@dataclass(frozen=True)
class Picture:
    """A file of docs/, what it shows, how it is drawn, and the results that it is drawn from."""

    values: Callable[[], Any]
    draw: Callable[[Path], None]
    results: tuple[str, ...] = ()


PICTURES = {
    "tokens.svg": Picture(tokens, draw_tokens, ("llama", "engines")),
    "contexts.svg": Picture(contexts, draw_contexts, ("contexts",)),
    "numerics.svg": Picture(numerics, draw_numerics),
    "two_ranks.svg": Picture(two_ranks, draw_two_ranks, ("scaling",)),
    "cache_memory.svg": Picture(cache_memory, draw_cache_memory),
}


def main(
    arguments: list[str],
    pictures: Mapping[str, Picture] = PICTURES,
    folder: Path = DOCS,
    description: str = __doc__,
) -> int:
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(pictures)}; all by default")
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.names) - pictures.keys():
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(pictures)}")
    parsed.out.mkdir(parents=True, exist_ok=True)
    for name in parsed.names or pictures:
        pictures[name].draw(parsed.out / name)
        print(parsed.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
