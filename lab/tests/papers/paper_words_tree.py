# SPDX-License-Identifier: BSD-3-Clause
"""What lab/papers/README.md must say of Tree Attention: words around numbers of results."""

import math
import re
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.harness.results import number, read_table
from lab.papers import tables, tree
from lab.papers.memory import formula, problem_of
from lab.simulation import RING
from paper_results import MINUS, TIMES, Words, listed, result, rows, summary


def overflow() -> Words:
    return [f"overflow from scores of {math.ceil(math.log(sys.float_info.max))} on"]


def theorem_1() -> Words:
    (last,) = (row for row in read_table("theorem1").rows if row["ranks"] == "4,096")
    steps, merges = (last[f"tree {name}"].split(" / ") for name in ("steps", "merges"))
    return [
        f"to {last['ranks']} ranks: {steps[0]} steps and {merges[0]} merges in a row for fan-in 2, "
        f"{steps[-1]} steps and {merges[-1]} merges for 16, against {last['ring steps']} hops",
    ]


def section_5_2() -> Words:
    table = read_table("gradient_cost").rows
    (last,) = (row for row in table if row["ranks"] == "4,096")
    (first,) = (row for row in table if row["ranks"] == "1")
    assert all(row["right"] == "yes" for row in table)
    a, b, c, d = (
        last[f"{what}, {name} /F"]
        for name in ("Algorithm 2", "backward")
        for what in ("operations", "depth")
    )
    return [
        f"to {last['ranks']} ranks: Algorithm 2 takes {a} times the operations of the value and "
        f"{b} times its depth, a pass back {c} and {d} times. The value's depth is "
        f"{first['depth of F']} on one rank and {last['depth of F']} on all",
    ]


def appendix_d() -> Words:
    table = read_table("jax_listing").rows
    mended = max((row["mended"] for row in table), key=float)
    return [
        f"by up to {float(table[-1]['as printed']):.1f}. With lse in the axes of o it differs from "
        f"ours by at most {mended}",
    ]


def algorithm_3() -> Words:
    found = rows("tree_fan_ins")

    def us(world: str, *methods: str, unit: float = 1e6) -> list[float]:
        return [unit * found[f"{world} ranks: {method}"]["ours"] for method in methods]

    steps = found["dgx_h100, 128 ranks: tree_allreduce"]["steps"]
    names = "tree_allreduce", "tree_allreduce_16", "three_allreduce", "butterfly"
    a, b, c, d = us("dgx_h100, 128", *names)
    e, f, g, h = us("two-level, 64", names[0], "tree_allreduce_4", *names[2:], unit=1e3)
    (levels,) = us("three-level, 64", "tree_allreduce_4_8_2", unit=1e3)
    (doubling,) = us("three-level, 64", names[0], unit=1e3)

    def measured(method: str) -> str:
        cases = (f"metro p={hosts} B=1 n=256" for hosts in (2, 4, 8, 16))
        return listed([result("cluster_metro", "ms", case=x, method=method) for x in cases], 1)

    return [
        f"{steps} steps for 128 ranks",
        f"on 128 H100 {a:.0f} us, with a fan-in of 16 {b:.0f} us, by NCCL's own all-reduces "
        f"{c:.0f} us, and one exchange of (o, lse) {d:.0f} us; on 64 hosts of two levels {e:.1f}, "
        f"with a fan-in of 4 {f:.1f}, Gloo's rings {g:.0f}, one exchange {h:.1f} ms; on three "
        f"levels {doubling:.1f} by doubling and {levels:.1f} ms with a fan-in for each level",
        "on 2, 4, 8 and 16 [emulated hosts](../../benchmarks/results/cluster_metro.md), 1 ms and 1 "
        f"Gb/s, it takes {measured('tree_allreduce')} ms, and one exchange by `butterfly` "
        f"{measured('butterfly')} ms",
    ]


def links() -> Words:
    notes = " ".join(read_table("links").notes)
    fits = re.findall(r"send/recv [\w ]+: ([\d,.]+) us and ([\d.]+) GB/s, within (\d+) %", notes)
    (near, near_rate, near_error), (far, far_rate, far_error) = fits
    return [
        f"{number(near) / 1000:.2f} ms + bytes / {float(near_rate):.2f} GB/s inside a node "
        f"(0.1 ms, 10 Gb/s), {number(far) / 1000:.2f} ms + bytes / {far_rate} GB/s between nodes "
        f"(1 ms, 1 Gb/s); lines within {near_error} % and {far_error} %"
    ]


def tree_figure_3() -> Words:
    found = rows("tree_figure_3")
    most = [found[f"128 H100, {keys}k keys"] for keys in ("5,120", "1,280", "80")]
    cost = most[0]["overhead"]
    more, fixed = 1e3 * cost, [(r["ring"] + cost) / (r["tree"] + cost) for r in most[1:]]
    return [
        f'Published: ring / tree "close to {TIMES}{tree.FIGURE_3_RATIO:.0f}". Ours: simulated '
        f"{most[0]['ours']:,.0f} at that point, {found['8 H100, 5,120k keys']['ours']:.0f} on 8 "
        f"GPUs. {TIMES}8 needs {more:.0f} ms more in both arms at 5.12M keys; with them the ratio "
        f"would be {fixed[0]:.1f} at 1.28M and {fixed[1]:.1f} at 80k",
        *figure_3_axes(found),
    ]


def figure_3_axes(found: dict[str, dict[str, Any]]) -> Words:
    def of(gpus: int, keys: str, name: str) -> float:
        row = found[f"{gpus} H100, {keys}k keys"]
        return float(row[name] / row["shortest"])

    def ms(name: str) -> str:
        times = [1e3 * found[f"{p} H100, 5,120k keys"][name] for p in tree.FIGURE_3_GPUS]
        return listed(times, 2 if name == "tree" else 0)

    a, b = (of(p, "5,120", "ring") for p in (8, 128))
    c, d, e, f = (of(p, keys, "tree") for p in (8, 128) for keys in ("80", "5,120"))
    return [
        f"(a) of 80k to 5.12M keys, relative to the ring's 80k: the ring to {a:.0f} on 8 GPUs and "
        f"{b:.0f} on 128, the tree {c:.2f} to {d:.2f} and {e:.3f} to {f:.3f}. (b) at 5.12M keys on "
        f"{', '.join(map(str, tree.FIGURE_3_GPUS))} GPUs: the tree {ms('tree')} ms, the ring "
        f"{ms('ring')} ms",
    ]


def tree_table(name: str, *further: Callable[[], str]) -> Callable[[], Words]:
    def words() -> Words:
        found = list(rows(name).values())
        published, sheet, fitted = (
            listed([row[key] for row in found]) for key in ("published", "data_sheet", "ours")
        )
        errors = [100 * (row["left_out"] / row["published"] - 1) for row in found]
        each = ", ".join(f"{x:+.0f} %".replace("-", MINUS) for x in errors)
        if max(map(abs, errors)) < 5:
            each = f"within {max(map(abs, errors)):.1f} %"
        return [
            f"{published} ms",
            f"Ours: data sheet {sheet}; fitted {fitted}.",
            f"each context from a fit to the three others: {each}",
            *(make() for make in further),
        ]

    return words


def fitted(name: str) -> tuple[str, ...]:
    return summary(
        name, r"one link of ([\d.]+) GB/s and ([\d.]+) ms .*every row is within ([\d.]+)"
    )


def h100() -> str:
    bandwidth, constant, error = (float(x) for x in fitted("tree_table_1_h100"))
    return (
        f"heads over {bandwidth:.0f} GB/s and {constant:.2f} ms per layer and token, "
        f"within {error:.0f} %"
    )


def mi300x() -> str:
    bandwidth, constant, error = (float(x) for x in fitted("tree_table_1_mi300x"))
    return (
        f"{bandwidth:.1f} GB/s, which is {100 * bandwidth / 64:.0f} % of one link of the data "
        f"sheet, and {constant:.3f} ms, within {error:.1f} %"
    )


def rtx_4090() -> str:
    bandwidth, constant, error = (float(x) for x in fitted("tree_table_2"))
    return f"{bandwidth:.2f} GB/s and {constant:.3f} ms less in the ring, within {error:.1f} %"


def rtx_4090_alone() -> str:
    alone, its_error = summary("tree_table_2", r"([\d.]+) GB/s alone are within ([\d.]+)")
    shortest = rows("tree_table_2")["8k keys"]
    (assumed,) = re.findall(r"(\d+) GB/s per slot", tables.NAMED["pcie_4090"].source)
    return (
        f"{alone} GB/s alone are within {its_error} %, which the standard error of the shortest "
        f"context ({shortest['standard_error']:.2f} of {shortest['published']:.2f} ms) allows. "
        f"These cards copy to each other through the host; {assumed} GB/s was assumed"
    )


def protocol() -> Words:
    seconds = [pair for table in tables.TABLES.values() for pair in table.seconds.values()]
    ratios = [ring / tree_ for tree_, ring in seconds]
    rings = ("ring as published", "ring of key heads", "ring, passing queries")
    arms = ("tree as published", *rings, "ours")
    ms = [f"{result('tree_protocol', 'ms /token', case=f'2000 tokens: {x}'):.0f}" for x in arms]
    trained = "tree_protocol_passkey-llama"
    arms = ("tree as published", "tree of 3 log2 p steps", *rings, "ours")
    ours = [f"{result(trained, 'ms /token', case=f'500 tokens: {x}'):.0f}" for x in arms]

    def whole(name: str, tokens: int) -> float:
        ring, tree_ = (
            result(name, "with ten tokens s", case=f"{tokens} tokens: {arm} as published")
            for arm in ("ring", "tree")
        )
        return ring / tree_

    return [
        f"Derived from the published seconds: ring / tree {min(ratios):.1f} to {max(ratios):.1f}",
        f"Ours, with the prompt: {whole('tree_protocol', 2000):.2f} with random weights and "
        f"{whole(trained, 500):.2f} with a trained model",
        f"1 of 16 layers, 2 hosts, 1 ms and 1 Gb/s, 2,000 tokens: ms per token {ms[0]} tree as "
        f"published, {ms[1]} ring as published, {ms[2]} ring of key heads, {ms[3]} ring that "
        f"passes queries, {ms[4]} ours",
        "makes the ring send 4 times as much",
        f"500 tokens, all arms make the same text; {ours[0]} tree as published, {ours[1]} tree of "
        f"3 log2 p steps, {ours[2]} ring as published, {ours[3]} ring of key heads, {ours[4]} ring "
        f"that passes queries, {ours[5]} ours",
    ]


def tree_figure_4() -> Words:
    found = rows("tree_figure_4")
    gaps = [[found[f"hidden size {h}, {p} ranks"]["ours"] for h in (2048, 4096)] for p in (2, 4)]
    problem = problem_of(tree.FIGURE_4_KEYS, (16, 16))
    two, four = (
        1e-6 * (formula(RING, p, problem) - formula(tree.TREE, p, problem)) for p in (2, 4)
    )
    shown = [f"{x:,.1f}" for x in (*gaps[0], *gaps[1])]
    small, large = tree.FIGURE_4.values()
    return [
        f"Published: ring {MINUS} tree {small} MB (hidden size 2048), {large:,} MB (4096). Ours: "
        f"{shown[0]} and {shown[1]} MB with two ranks, {shown[2]} and {shown[3]} MB with four; "
        f"measured at 2048: {two:,.1f} MB with two ranks, {four:,.1f} MB with four",
        f"{tree.FIGURE_4_KEYS:,} keys per rank",
    ]


def of_8_ranks(method: str) -> dict[str, Any]:
    return rows("tree_equations_10_to_14")[f"8 ranks, 640k keys: {method}"]


def ring_volume() -> Words:
    row = of_8_ranks(RING)
    published, sent = int(row["published"]), row["ours"]
    more = sent - published * 7 // 8
    return [
        f"elements, so {published:,} bytes on 8 ranks, 640k keys. Ours: {sent:,} bytes counted. "
        f"P {MINUS} 1 hops are enough; {more} bytes say how long the shards are"
    ]


def tree_volume() -> Words:
    row = of_8_ranks(tree.TREE)
    published, sent = int(row["published"]), row["ours"]
    others = [
        f"{of_8_ranks(x)['ours']:,} `{x}`" for x in ("hierarchical", "butterfly", "all_gather")
    ]
    return [
        f"{published:,} bytes on 8 ranks",
        f"Ours: {sent:,} bytes counted (`{tree.TREE}`), {', '.join(others)}. States travel in "
        f"float32, and {sent - 2 * published} bytes tell",
    ]


def section_6_3() -> Words:
    row = rows("tree_figure_3")["8 H100, 640k keys"]
    attention, hop, ring = (1e3 * row[name] for name in ("attention", "hop", "ring"))
    return [
        f"8 H100, 640k keys: {attention:.3f} ms to read a shard, {hop:.2f} ms for a hop of the "
        f"ring, {ring:.2f} ms for all 7 of them and the last shard"
    ]


# By the beginning of the title.
SAYS: dict[str, Callable[[], Words]] = {
    "Eq. 1 to 3": overflow,
    "Theorem 1": theorem_1,
    "Section 5.2": section_5_2,
    "Algorithm 3: three": algorithm_3,
    "Figure 2: send/recv": links,
    "Figure 3: latency": tree_figure_3,
    "Table 1, 8 H100": tree_table("tree_table_1_h100", h100),
    "Table 1, 4 MI300X": tree_table("tree_table_1_mi300x", mi300x),
    "Table 2, 2 RTX": tree_table("tree_table_2", rtx_4090, rtx_4090_alone),
    "Protocol of both": protocol,
    "Figure 4, Eq. 8 and 9": tree_figure_4,
    "Eq. 10 and 11: volume": ring_volume,
    "Eq. 12 to 14": tree_volume,
    "Section 6.3": section_6_3,
    "Appendix D": appendix_d,
}
