# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of lab/papers/README.md that are computed or measured, by name.

A result of the page names them in a comment, `<!-- values: NAME ... -->`, and a test compares: the
page has these numbers in this order, and no other but those that `<!-- given: ... -->` lists, as
published ones and sizes. Words are free.

python -m lab.papers.values                # of each name, the numbers as they are now
python -m lab.papers.values tree_table_2
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from statistics import mean
from typing import Any

from benchmarks.harness.report import Report
from benchmarks.harness.results import number, read_table
from lab.simulation import RING
from lab.simulation.schedule import BEST_SPLIT, FLASH_ATTENTION_2, FLASH_DECODING, LEAN

from . import average, lean, tables, tree
from .__main__ import FIGURES
from .memory import formula, problem_of

MINUS = "\N{MINUS SIGN}"


@cache
def report(name: str) -> Report:
    return FIGURES[name]()


@cache
def rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report(name).rows}


def cells(name: str, heading: str) -> list[str]:
    """The column of a printed figure."""
    (found,) = (column.values for column in report(name).columns if column.heading == heading)
    return list(found)


def result(file: str, column: str, **wanted: str) -> float:
    """A cell of benchmarks/results/FILE.md, of the only row with these cells."""
    found = [x for x in read_table(file).rows if wanted.items() <= x.items()]
    if len(found) != 1:
        raise ValueError(f"{file}.md has {len(found)} rows with {wanted}")
    return number(found[0][column])


def listed(values: Iterable[float], digits: int = 2) -> list[str]:
    return [f"{value:,.{digits}f}" for value in values]


def summary(name: str, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern in the sentences under a figure."""
    found = re.search(pattern, " ".join(report(name).summary))
    if found is None:
        raise ValueError(f"{name} does not say {pattern}")
    return found.groups()


# Tree Attention


def overflow() -> list[str]:
    """From which scores on exp is infinite."""
    return [f"{math.ceil(math.log(sys.float_info.max))}"]


def theorem_1() -> list[str]:
    (last,) = (row for row in read_table("theorem1").rows if row["ranks"] == "4,096")
    steps, merges = (last[f"tree {name}"].split(" / ") for name in ("steps", "merges"))
    return [last["ranks"], steps[0], merges[0], steps[-1], merges[-1], last["ring steps"]]


def section_5_2() -> list[str]:
    by_ranks = {row["ranks"]: row for row in read_table("gradient_cost").rows}
    first, last = by_ranks["1"], by_ranks["4,096"]
    costs = [
        last[f"{what}, {name} /F"]
        for name in ("Algorithm 2", "backward")
        for what in ("operations", "depth")
    ]
    return [last["ranks"], *costs, first["depth of F"], last["depth of F"]]


def appendix_d() -> list[str]:
    table = read_table("jax_listing").rows
    right = max((row["mended"] for row in table), key=float)
    return [f"{float(table[-1]['as printed']):.1f}", right]


def fan_ins() -> list[str]:
    found = rows("tree_fan_ins")

    def of(world: str, methods: str, digits: int, unit: float) -> list[str]:
        times = (unit * found[f"{world} ranks: {method}"]["ours"] for method in methods.split())
        return listed(times, digits)

    levels = "tree_allreduce tree_allreduce_4"
    return [
        f"{found['dgx_h100, 128 ranks: tree_allreduce']['steps']}",
        *of("dgx_h100, 128", "tree_allreduce tree_allreduce_16", 0, 1e6),
        *of("dgx_h100, 128", "three_allreduce butterfly", 0, 1e6),
        *of("two-level, 64", levels, 1, 1e3),
        *of("two-level, 64", "three_allreduce", 0, 1e3),
        *of("two-level, 64", "butterfly", 1, 1e3),
        *of("three-level, 64", "tree_allreduce tree_allreduce_4_8_2", 1, 1e3),
    ]


def fan_ins_measured() -> list[str]:
    return listed(
        [
            result("cluster_metro", "ms", case=f"metro p={hosts} B=1 n=256", method=method)
            for method in ("tree_allreduce", "butterfly")
            for hosts in (2, 4, 8, 16)
        ],
        1,
    )


def links() -> list[str]:
    notes = " ".join(read_table("links").notes)
    fits = re.findall(r"send/recv [\w ]+: ([\d,.]+) us and ([\d.]+) GB/s, within (\d+) %", notes)
    (near, near_rate, near_error), (far, far_rate, far_error) = fits
    near_ms, far_ms = listed((number(near) / 1000, number(far) / 1000))
    return [near_ms, f"{float(near_rate):.2f}", far_ms, far_rate, near_error, far_error]


def tree_figure_3() -> list[str]:
    found = rows("tree_figure_3")
    most, *fewer = (found[f"128 H100, {keys}k keys"] for keys in ("5,120", "1,280", "80"))
    cost = most["overhead"]
    fixed = [(row["ring"] + cost) / (row["tree"] + cost) for row in fewer]
    ours = most["ours"], found["8 H100, 5,120k keys"]["ours"], 1e3 * cost
    return [*listed(ours, 0), *listed(fixed, 1)]


def tree_figure_3_axes() -> list[str]:
    found = rows("tree_figure_3")

    def of(name: str, gpus: int, *by_keys: str) -> list[float]:
        both = (found[f"{gpus} H100, {keys}k keys"] for keys in by_keys)
        return [row[name] / row["shortest"] for row in both]

    def ms(name: str, digits: int) -> list[str]:
        by_gpus = (found[f"{p} H100, 5,120k keys"] for p in tree.FIGURE_3_GPUS)
        return listed((1e3 * row[name] for row in by_gpus), digits)

    axis_a = listed((*of("ring", 8, "5,120"), *of("ring", 128, "5,120")), 0)
    axis_a += [*listed(of("tree", 8, "80", "5,120")), *listed(of("tree", 128, "80", "5,120"), 3)]
    return [*axis_a, *map(str, tree.FIGURE_3_GPUS), *ms("tree", 2), *ms("ring", 0)]


def tree_table(name: str) -> list[str]:
    """Published, by data sheets, fitted; and how far off each is from a fit to the others."""
    found = list(rows(name).values())
    columns = ([row[key] for row in found] for key in ("published", "data_sheet", "ours"))
    return [text for column in columns for text in listed(column)]


def left_out(name: str) -> list[str]:
    errors = [100 * (row["left_out"] / row["published"] - 1) for row in rows(name).values()]
    if max(map(abs, errors)) < 5:
        return [f"{max(map(abs, errors)):.1f}"]
    return [f"{x:+.0f}".replace("-", MINUS) for x in errors]


def fit(name: str, *digits: int) -> list[str]:
    """Bandwidth, constant and error of one."""
    pattern = r"one link of ([\d.]+) GB/s and ([\d.]+) ms .*every row is within ([\d.]+)"
    return [f"{float(x):.{n}f}" for x, n in zip(summary(name, pattern), digits, strict=True)]


def fit_of_mi300x() -> list[str]:
    bandwidth, constant, error = fit("tree_table_1_mi300x", 1, 3, 1)
    return [bandwidth, f"{100 * float(bandwidth) / 64:.0f}", constant, error]


def fit_of_bandwidth() -> list[str]:
    alone, its_error = summary("tree_table_2", r"([\d.]+) GB/s alone are within ([\d.]+)")
    shortest = rows("tree_table_2")["8k keys"]
    (assumed,) = re.findall(r"(\d+) GB/s per slot", tables.NAMED["pcie_4090"].source)
    both = listed((shortest["standard_error"], shortest["published"]))
    return [alone, its_error, *both, assumed]


ARMS = (
    "tree as published",
    "ring as published",
    "ring of key heads",
    "ring, passing queries",
    "ours",
)


def protocol() -> list[str]:
    seconds = [pair for table in tables.TABLES.values() for pair in table.seconds.values()]
    ratios = [ring / tree_ for tree_, ring in seconds]

    def whole(name: str, tokens: int) -> float:
        ring, tree_ = (
            result(name, "with ten tokens s", case=f"{tokens} tokens: {arm} as published")
            for arm in ("ring", "tree")
        )
        return ring / tree_

    trained = whole("tree_protocol_passkey-llama", 500)
    both = whole("tree_protocol", 2000), trained
    return [*listed((min(ratios), max(ratios)), 1), *listed(both)]


def protocol_ms(name: str, tokens: int, *arms: str) -> list[str]:
    return listed((result(name, "ms /token", case=f"{tokens} tokens: {arm}") for arm in arms), 0)


def tree_figure_4() -> list[str]:
    found = rows("tree_figure_4")
    ours = [found[f"hidden size {h}, {p} ranks"]["ours"] for p in (2, 4) for h in (2048, 4096)]
    problem = problem_of(tree.FIGURE_4_KEYS, (16, 16))
    measured = (1e-6 * (formula(RING, p, problem) - formula(tree.TREE, p, problem)) for p in (2, 4))
    published = [f"{x:,}" for x in tree.FIGURE_4.values()]
    return [*published, *listed(ours, 1), *listed(measured, 1), f"{tree.FIGURE_4_KEYS:,}"]


def of_8_ranks(method: str) -> dict[str, Any]:
    return rows("tree_equations_10_to_14")[f"8 ranks, 640k keys: {method}"]


def ring_volume() -> list[str]:
    row = of_8_ranks(RING)
    published, sent = int(row["published"]), row["ours"]
    return [f"{published:,}", f"{sent:,}", f"{sent - published * 7 // 8}"]


def tree_volume() -> list[str]:
    row = of_8_ranks(tree.TREE)
    published, sent = int(row["published"]), row["ours"]
    others = [f"{of_8_ranks(x)['ours']:,}" for x in ("hierarchical", "butterfly", "all_gather")]
    return [f"{published:,}", f"{sent:,}", *others, f"{sent - 2 * published}"]


def section_6_3() -> list[str]:
    row = rows("tree_figure_3")["8 H100, 640k keys"]
    attention, *others = (1e3 * row[name] for name in ("attention", "hop", "ring"))
    return [*listed([attention], 3), *listed(others)]


# LeanAttention


def algorithm_4(column: str, *schedules: str) -> list[str]:
    table = {row["schedule"]: row for row in read_table("algorithm_4").rows}
    return [table[name][key] for name in schedules for key in column.split("; ")]


def lean_figure_1() -> list[str]:
    tiles, occupancy = (cells("lean_figure_1", x) for x in ("tiles until the end", "occupancy"))
    published = cells("lean_figure_1", "published")
    return [*published[:3], *tiles, *(x.removesuffix(" %") for x in occupancy)]


def generation(column: str, prompt: int, new: int, shape: str = "1.3b, 24 layers") -> float:
    """Of a whole model, fitted to some of its layers."""
    name = f"{shape}, {prompt} tokens, {new} new, fitted"
    return result("lean_figure_3", column, case=name)


def lean_figure_3() -> list[str]:
    share = "decoding's share"
    by_prompt = [(1024, 16), (4096, 64), (16384, 256), (1024, 64), (1024, 256)]
    of_two = "1.3b, 2 layers, 1024 tokens, 256 new"
    shares = [generation(share, *x) for x in by_prompt]
    shares.append(result("lean_figure_3", share, case=of_two))
    return listed([*shares, generation(share, 1024, 64, "6.7b, 32 layers")], 0)


def lean_figure_4() -> list[str]:
    *by_heads, of_8 = rows("lean_figure_4").values()

    def of(name: str) -> list[float]:
        return [100 * row["occupancy"][name] for row in by_heads]

    ends = [end(of(name)) for name in (FLASH_ATTENTION_2, FLASH_DECODING) for end in (min, max)]
    last = 100 * of_8["occupancy"][FLASH_ATTENTION_2]
    return [*listed(ends, 0), f"{min(of(LEAN)):.1f}", f"{last:.0f}"]


def speedups(cases: Iterable[lean.Case], kind: str, over: str = FLASH_ATTENTION_2) -> list[str]:
    return listed(lean.row_of(case)[kind][over] for case in cases)


def over(which: str, cases: Iterable[lean.Case], *published: float) -> list[lean.Case]:
    """The cases of which the paper has these speedups, in this order."""
    found = {getattr(case, which): case for case in cases if getattr(case, which)}
    if found.keys() != set(published):
        raise ValueError(f"the published speedups are {list(found)}, got {published}")
    return [found[x] for x in published]


def figure(name: str) -> list[lean.Case]:
    return [case for case in lean.FIGURE_7 + lean.FIGURE_8 if case.figure == name]


FIGURE_7 = partial(over, "over_fa2", lean.FIGURE_7, 2.46, 12.5, 2.15, 8.33, 4.71, 1.5, 1.1)


def lean_figure_7() -> list[str]:
    cases = FIGURE_7()
    (more,) = summary("lean_figure_7", r"needs (\d+) us more")
    both = [*speedups(cases, "tiles"), *speedups(cases, "costs")]
    return [*both, f"{cases[1].heads}", f"{round(float(more), -1):.0f}"]


def points(name: str, attribute: str = "") -> list[str]:
    """All points of a figure with costs, behind what they are drawn over."""
    by = [str(getattr(case, attribute)) for case in figure(name)] if attribute else []
    return [*by, *speedups(figure(name), "costs")]


def lean_figure_7_over_flash_decoding() -> list[str]:
    derived = 2.46 / 2.06
    first, *others = over("over_flash_decoding", lean.FIGURE_7, derived, 1.71, 1.06, 1.5, 0.99)
    ours = speedups([*others, first], "costs", FLASH_DECODING)
    return [f"{derived:.2f}", *ours]


def lean_average() -> list[str]:
    found = rows("lean_average")["all"]["ratios"]
    fa2, flash_decoding = found["FA-2"], found["FD"]
    least = average.PUBLISHED["FD"][1]
    published = [f"{average.PUBLISHED[name][0]}" for name in ("FA-2", "FD")]
    means = listed((mean(fa2), mean(flash_decoding)))
    ends = listed((min(fa2), min(flash_decoding)))
    below = [f"{sum(x < limit for x in flash_decoding)}" for limit in (1, least)]
    others = summary("lean_figure_7", r"fit to the others: ([\d.]+) to ([\d.]+) times")
    return [*published, *means, f"{len(fa2)}", *ends, *below, *others]


def schedules() -> list[str]:
    cases = "1 key head", "2 key heads", "3 key heads"
    columns = "/FA-2", "/FA-2 by tiles", "/FD", "/FD by tiles"
    return listed(result("lean_schedules", x, case=case) for x in columns for case in cases)


def lean_figure_8() -> list[str]:
    cases = over("over_fa2", lean.FIGURE_8, 1.70, 4.18, 7.8)
    short = speedups(lean.FIGURE_8[:2], "costs")
    return [*speedups(cases, "tiles"), *speedups(cases, "costs"), *short]


def lean_figure_9() -> list[str]:
    cases = [case for case in lean.FIGURE_9 if case.over_fa2]
    return [*(f"{case.over_fa2}" for case in cases), *speedups(cases, "costs")]


def lean_figure_10() -> list[str]:
    case = lean.FIGURE_10[-1]
    row, lengths = lean.row_of(case), (1024, 4096, 16384)
    attention = row["tiles"][FLASH_ATTENTION_2], row["ours"]
    flash_decoding = row["costs"][FLASH_DECODING], row["tiles"][FLASH_DECODING]
    long = "1.3b, 24 layers, 50000 tokens, 1000 new, extrapolated"
    prompts = [
        generation("sdpa's prefill s", x, 256) / generation("prefill s", x, 256) for x in lengths
    ]
    a, b, c = listed(generation("sdpa /ours", x, 256) for x in lengths)
    return [
        *(f"{case.over_fa2}", f"{case.over_flash_decoding}"),
        *listed((*attention, *flash_decoding)),
        *(a, "1,024", b, "4,096", c, "16,384"),
        *listed([result("lean_figure_3", "sdpa /ours", case=long)], 1),
        *listed(prompts, 1),
    ]


def fixed_splits() -> list[str]:
    worst, of_figure = summary("lean_figure_7", r"at most ([\d.]+) % longer .* and ([\d.]+) % in")
    (more,) = (case for case in lean.FIGURE_7 if case.over_flash_decoding == 1.71)
    longer = [
        100 * lean.row_of(case)["tiles"][FLASH_DECODING] - 100 for case in (*lean.KNOWN, more)
    ]
    return [worst, of_figure, *listed((min(longer), max(longer)), 0)]


def advantage() -> list[str]:
    ragged, captured, short = (
        rows("lean_advantage")[name]["ratios"]
        for name in (
            "16 sequences of 512 to 128k",
            "16 of 512 to 128k, captured for 128k each",
            "1 sequence of 2k",
        )
    )
    names = FLASH_DECODING, "FlashInfer", BEST_SPLIT
    a, b = listed((ragged[name] for name in names[:2]), 1)
    of_short = sorted({f"{short[name]:.2f}" for name in names})
    return [
        *(a, b, f"{ragged[BEST_SPLIT]:.2f}"),
        *listed((captured[name] for name in names), 1),
        *of_short,
    ]


# Fast Attention


def slow_memory() -> list[str]:
    times = [number(row["/ N2d2/M"]) for row in read_table("slow_memory").rows]
    return listed((min(times), max(times)), 1)


def lsh() -> list[str]:
    one, sixteen = (result("lsh", "relative error", buckets="16", rounds=x) for x in ("1", "16"))
    return [f"{one:.1f}", f"{sixteen:.2f}"]


def sorted_chunks() -> list[str]:
    lengths = 1024, 4096, 16384, 65536

    def ms(column: str) -> list[str]:
        found = [result("lsh_time", column, tokens=f"{n} tokens") for n in lengths]
        return [f"{x:.1f}" if x < 10 else f"{x:,.0f}" for x in found]

    return [*ms("sorted chunks ms"), *(f"{n:,}" for n in lengths), *ms("all keys ms")]


def sparse() -> list[str]:
    first, window, blocks = (
        f"B=1 65536 {x}"
        for x in ("first 4, window 2044", "window 4096", "every eighth block of 64")
    )

    def ms(case: str, column: str = "ours us", digits: int = 2) -> list[str]:
        return listed([result("sparse", column, case=case) / 1000], digits)

    def seen(case: str) -> str:
        return f"{result('sparse', 'keys', case=case)}"

    return [
        *ms(first, "all keys us", 1),
        *(seen(window), *ms(window), seen(first), *ms(first)),
        *(*ms(blocks), *ms(blocks, "page list us")),
    ]


def waste() -> list[str]:
    largest = "the largest length"
    kinds = [
        result("cache_waste", x, **{"at once": largest})
        for x in ("reserved", "internal", "external")
    ]
    used = [
        result("cache_waste", "used", **{"at once": name})
        for name in (
            largest,
            "the next power of two",
            "the final length, known ahead",
            "blocks of 16",
        )
    ]
    return listed([used[0], *kinds, *used[1:]], 1)


def survey_error(method: str, *wanted: tuple[int, str]) -> list[str]:
    """By the number of features or keys and the size of the scores."""
    found = (
        result(
            "survey_errors", "relative error", method=method, size=size,
            **{"features or keys": str(count)},
        )
        for count, size in wanted
    )  # fmt: skip
    return [f"{x:g}" for x in found]


def extrapolation() -> list[str]:
    table = {row["positions"]: row for row in read_table("positions").rows}
    lengths = [int(name.removesuffix(" bytes")) for name in table["T5"] if name.endswith(" bytes")]
    ends = min(lengths), max(lengths)
    kinds = "sinusoidal", "rotary", "T5", "ALiBi"
    return [*map(str, ends), *(table[kind][f"{end} bytes"] for kind in kinds for end in ends)]


def lone_block() -> list[str]:
    """The share of an SM's bandwidth that a lone block reaches, and what each of the seven
    speedups is from a fit to the six others."""
    ends = summary("lean_figure_7", r"fit to the others: ([\d.]+) to ([\d.]+) times")
    return [f"{lean.LONE}", *ends]


_TRAINED = ARMS[0], "tree of 3 log2 p steps", *ARMS[1:]
VALUES: dict[str, Callable[[], list[str]]] = {
    "overflow": overflow,
    "theorem_1": theorem_1,
    "section_5_2": section_5_2,
    "appendix_d": appendix_d,
    "fan_ins": fan_ins,
    "fan_ins_measured": fan_ins_measured,
    "links": links,
    "tree_figure_3": tree_figure_3,
    "tree_figure_3_axes": tree_figure_3_axes,
    "tree_table_1_h100": partial(tree_table, "tree_table_1_h100"),
    "tree_table_1_h100_fit": partial(fit, "tree_table_1_h100", 0, 2, 0),
    "tree_table_1_h100_left_out": partial(left_out, "tree_table_1_h100"),
    "tree_table_1_mi300x": partial(tree_table, "tree_table_1_mi300x"),
    "tree_table_1_mi300x_fit": fit_of_mi300x,
    "tree_table_1_mi300x_left_out": partial(left_out, "tree_table_1_mi300x"),
    "tree_table_2": partial(tree_table, "tree_table_2"),
    "tree_table_2_fit": partial(fit, "tree_table_2", 2, 3, 1),
    "tree_table_2_left_out": partial(left_out, "tree_table_2"),
    "tree_table_2_bandwidth": fit_of_bandwidth,
    "protocol": protocol,
    "protocol_random": partial(protocol_ms, "tree_protocol", 2000, *ARMS),
    "protocol_trained": partial(protocol_ms, "tree_protocol_passkey-llama", 500, *_TRAINED),
    "tree_figure_4": tree_figure_4,
    "ring_volume": ring_volume,
    "tree_volume": tree_volume,
    "section_6_3": section_6_3,
    "algorithm_4_printed": partial(
        algorithm_4, "sizes; right; loses or mixes tiles; hangs", "AsPrinted"
    ),
    "algorithm_4_rounded_up": partial(
        algorithm_4, "right; loses or mixes tiles; hangs", "AsPrintedRoundedUp"
    ),
    "algorithm_4_corrected": partial(algorithm_4, "right", "CorrectedLast"),
    "algorithm_4_by_share": partial(algorithm_4, "hangs", "LastByShare"),
    "lone_block": lone_block,
    "lean_figure_1": lean_figure_1,
    "lean_figure_3": lean_figure_3,
    "lean_figure_4": lean_figure_4,
    "lean_figure_7": lean_figure_7,
    "lean_figure_7b": partial(points, "7b", "heads"),
    "lean_figure_7c": partial(points, "7c", "batch"),
    "lean_figure_7_over_flash_decoding": lean_figure_7_over_flash_decoding,
    "lean_average": lean_average,
    "schedules": schedules,
    "lean_figure_8": lean_figure_8,
    "lean_figure_8a": partial(points, "8a"),
    "lean_figure_9": lean_figure_9,
    "lean_figure_10": lean_figure_10,
    "fixed_splits": fixed_splits,
    "advantage": advantage,
    "slow_memory": slow_memory,
    "waste": waste,
    "lsh": lsh,
    "sorted_chunks": sorted_chunks,
    "sparse": sparse,
    "linear_random": partial(
        survey_error, "positive random features", (64, "1.0"), (4096, "1.0"), (64, "0.5"),
        (4096, "0.5"),
    ),
    "linear_elu": partial(survey_error, "elu(x) + 1", (64, "1.0"), (64, "0.5")),
    "low_rank": partial(survey_error, "averages of neighbours", (64, "1.0"), (512, "1.0")),
    "extrapolation": extrapolation,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.papers.values", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="without one: all")
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in VALUES]:
        parser.error(f"nothing is called {', '.join(unknown)}; there are {', '.join(VALUES)}")
    for name in names or VALUES:
        print(f"{name}: {', '.join(VALUES[name]())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
