# SPDX-License-Identifier: BSD-3-Clause
"""The average speedup of LeanAttention's abstract, by the model of its figures over many shapes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from benchmarks.harness.report import Report

from .comparison import Row, comparison, number
from .lean import CONTEXTS, NOTES, Case, with_costs

# Over FlashAttention-2 and FlashDecoding: mean, least and most of 500 samples that are not listed.
PUBLISHED = {"FA-2": (2.6, 1.1, 8.33), "FD": (1.27, 0.99, 1.71)}
HEADS, BATCHES = (8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 96), (1, 2, 4, 8, 16)


def average() -> Report:
    rows: list[Row] = []
    for batch in BATCHES:
        found = [with_costs(Case("", h, keys, batch).work) for h in HEADS for keys in CONTEXTS]
        ratios = {name: [pair[i] for pair in found] for i, name in enumerate(PUBLISHED)}
        rows.append({"name": f"B={batch}", "ratios": ratios})
    together = {name: [x for row in rows for x in row["ratios"][name]] for name in PUBLISHED}
    over_fa2 = {"published": PUBLISHED["FA-2"][0], "ours": mean(together["FA-2"])}
    rows.append({"name": "all", "ratios": together, **over_fa2})
    columns: dict[str, Callable[[Row], str]] = {"shapes": lambda row: str(len(row["ratios"]["FD"]))}
    for name in PUBLISHED:
        columns |= _columns(name)
    return comparison(
        "lean_average",
        "LeanAttention's average speedup over many shapes, simulated on an A100",
        rows,
        columns,
        (
            f"Every combination of 1k to 512k keys, {', '.join(map(str, HEADS))} heads of 64 and "
            "the batch; the paper does not list its 500. With costs. Mean, least and most; slower: "
            "in so many shapes LeanAttention takes longer.",
            NOTES[0],
        ),
    )


def _columns(name: str) -> dict[str, Callable[[Row], str]]:
    def of(values: list[float]) -> str:
        return " / ".join(number(make(values)) for make in (mean, min, max))

    return {
        f"/{name}": lambda row: of(row["ratios"][name]),
        f"/{name} slower": lambda row: str(sum(x < 1 for x in row["ratios"][name])),
        f"/{name} published": lambda row: (
            " / ".join(map(number, PUBLISHED[name])) if row["published"] else "-"
        ),
    }


FIGURES: dict[str, Callable[[], Report]] = {"lean_average": average}
