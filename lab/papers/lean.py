# SPDX-License-Identifier: BSD-3-Clause
"""LeanAttention's figures (arXiv:2405.10480) without a GPU, by `simulation.schedule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from benchmarks.harness.report import Report
from benchmarks.harness.shapes import log_uniform_lengths

from ..simulation.schedule import (
    ASSUMED,
    BEST_SPLIT,
    FLASH_ATTENTION_2,
    FLASH_DECODING,
    FLASH_INFER,
    LEAN,
    SCHEDULERS,
    TILES,
    Costs,
    Gpu,
    Work,
    fixed_split,
    gpu_of,
    mean_lone_share,
    ratios_to_lean,
    schedules,
    uniform,
)
from .comparison import Row, comparison, number

A100, H200 = gpu_of("A100"), gpu_of("H200")
K = 1024
CONTEXTS = tuple(K << exponent for exponent in range(10))  # 1k to 512k


@dataclass(frozen=True)
class Case:
    """A point of a figure; speedups of LeanAttention are None where the text gives none."""

    figure: str
    heads: int
    keys: int
    batch: int = 1
    gpus: int = 1
    head_dim: int = 64
    over_fa2: float | None = None
    over_flash_decoding: float | None = None
    assumed: str = ""  # what the paper does not say

    @property
    def name(self) -> str:
        context = f"{self.keys // K}k"
        text = f"{self.figure}: {self.heads} heads, {context}, B={self.batch}"
        return text + (f", {self.gpus} GPUs" if self.gpus > 1 else "")

    @property
    def work(self) -> Work:
        return uniform(self.keys, self.heads, self.batch, self.gpus, self.head_dim)


# "over 2 beyond 8k": LeanAttention over FlashAttention-2; 2.46 and FlashDecoding's 2.06 at 512k.
FIGURE_7 = (
    *(Case("7a", 56, keys) for keys in CONTEXTS[:-1]),
    Case("7a", 56, CONTEXTS[-1], over_fa2=2.46, over_flash_decoding=2.46 / 2.06),
    Case("7b", 8, 64 * K, over_fa2=12.5, assumed="heads, B"),  # "at small model sizes"
    *(Case("7b", heads, 64 * K, assumed="B") for heads in (16, 24, 32, 48)),
    Case("7b", 64, 64 * K, over_fa2=2.15, assumed="B"),
    Case("7c", 32, 64 * K, 1, 1, 64, 4.71, 1.06, "heads, context"),
    *(Case("7c", 32, 64 * K, batch, assumed="heads, context") for batch in (2, 4, 8)),
    Case("7c", 32, 64 * K, 16, 1, 64, 1.5, 1.5, "heads, context"),
    Case("text", 16, 512 * K, over_fa2=8.33),
    Case("text", 24, 512 * K, over_flash_decoding=1.71),
    Case("text", 24, K, over_fa2=1.1, over_flash_decoding=0.99),
)
FIGURE_8 = (
    *(Case("8a", 192, keys, 4, 8) for keys in CONTEXTS[:-1]),
    Case("8a", 192, CONTEXTS[-1], 4, 8, over_fa2=1.70, over_flash_decoding=1.70),
    Case("8b", 64, 256 * K, 4, 8, over_fa2=4.18),
    *(Case("8b", heads, 256 * K, 4, 8) for heads in (96, 128, 192, 256)),
    Case("8c", 128, 256 * K, 1, 8, over_fa2=7.8, assumed="context"),
    *(Case("8c", 128, 256 * K, batch, 8, assumed="context") for batch in (2, 4, 8, 16)),
)
FIGURE_9 = (
    Case("9", 32, K, head_dim=128, over_fa2=1.2, assumed="heads, B"),
    *(Case("9", 32, keys, head_dim=128, assumed="heads, B") for keys in CONTEXTS[1:-1]),
    Case("9", 32, CONTEXTS[-1], head_dim=128, over_fa2=3.67, assumed="heads, B"),
)
# A prompt of 50k and 64k new tokens; the paper's factor is that of the whole generation.
FIGURE_10 = (
    Case("10", 32, 51 * K),
    Case("10", 32, 114 * K, over_fa2=4.0, over_flash_decoding=1.06),
)
# Cases whose shape the paper gives (a context of 8c and B of 7b apart), at long contexts: what the
# lone share is fitted to.
KNOWN = tuple(
    case
    for case in FIGURE_7 + FIGURE_8 + FIGURE_10
    if case.over_fa2 and case.keys >= 64 * K and "heads" not in case.assumed
)
# Share of an SM's rate that FlashAttention-2's only block on it reached: fitted to the paper.
LONE = 0.79
FITTED = replace(ASSUMED, lone=LONE)

NOTES = (
    "Speedups are LeanAttention's. By tiles: with equal LeanTiles (256 keys at head_dim 64, 128 at "
    "128) and nothing else. With costs: with a launch of 3 us, 1.5 us for each output of a block "
    f"and 0.05 us for each part merged, all assumed, and {LONE} of an SM's bandwidth for a grid "
    "with one block per SM or less, fitted to the paper.",
    "FlashDecoding takes FlashAttention 2.5's number of parts. FlashInfer makes the shortest parts "
    "of one length that all fit at once. Best is the fixed number of parts up to 128 with the "
    "least time. Several GPUs share the heads.",
    "What the paper does not say, and is assumed here, is in the last column.",
)


@cache
def row_of(case: Case) -> Row:
    work = case.work
    by_tiles, with_costs = (ratios_to_lean(work, A100, costs) for costs in (TILES, FITTED))
    plans = schedules(work, A100)
    return {
        "name": case.name,
        "published": case.over_fa2,
        "ours": with_costs[FLASH_ATTENTION_2],
        "published_over_flash_decoding": case.over_flash_decoding,
        "tiles": by_tiles,
        "costs": with_costs,
        "parts": {name: plan.parts for name, plan in plans.items()},
        "occupancy": {name: plan.occupancy(A100) for name, plan in plans.items()},
        "assumed": case.assumed,
        # Every schedule reads every tile once.
        "wrong": any(plan.blocks.sum() != work.tiles.sum() for plan in plans.values()),
    }


def speedups(figure: str, cases: Sequence[Case]) -> Report:
    rows = [row_of(case) for case in cases]
    return comparison(
        f"lean_figure_{figure}",
        f"LeanAttention, Figure {figure}: simulated on an A100",
        rows,
        {
            "/FA-2 by tiles": lambda row: number(row["tiles"][FLASH_ATTENTION_2]),
            "/FA-2 with costs": lambda row: number(row["costs"][FLASH_ATTENTION_2]),
            "/FA-2 published": lambda row: number(row["published"]),
            "/FD by tiles": lambda row: number(row["tiles"][FLASH_DECODING]),
            "/FD with costs": lambda row: number(row["costs"][FLASH_DECODING]),
            "/FD published": lambda row: number(row["published_over_flash_decoding"]),
            "FD parts": lambda row: str(row["parts"][FLASH_DECODING]),
            "/FlashInfer by tiles": lambda row: number(row["tiles"][FLASH_INFER]),
            "/best by tiles": lambda row: number(row["tiles"][BEST_SPLIT], 3),
            "best parts": lambda row: str(row["parts"][BEST_SPLIT]),
            "assumed": lambda row: row["assumed"],
        },
        NOTES,
        summary_of(rows) if figure == "7" else (),
    )


def summary_of(rows: Sequence[Row]) -> list[str]:
    """Say what the model says of the whole paper."""
    (more,) = (c for c in FIGURE_7 if c.over_flash_decoding == 1.71)
    known = [row_of(case) for case in (*KNOWN, more)]
    worst, worst_of_all = (
        100 * (max(row["tiles"][BEST_SPLIT] for row in some) - 1)
        for some in (known, [*rows, *known])
    )
    fitted = lone_share()
    errors = [row["ours"] / row["published"] for row in known if row["published"]]
    return [
        f"The best fixed number of parts takes at most {worst:.2f} % longer than LeanAttention by "
        f"tiles in the {len(known)} published cases with long contexts, and {worst_of_all:.1f} % "
        "in the rows of Figure 7.",
        f"Published speedups over FlashAttention-2 exceed those by tiles as if a block alone on an "
        f"SM reached {fitted:.3f} of its bandwidth; with {LONE} the model is {min(errors):.2f} to "
        f"{max(errors):.2f} times the paper in all {len(errors)} cases. Each from a fit to the "
        f"others: {min(foretold()):.2f} to {max(foretold()):.2f} times.",
        "At 1k keys the paper's 1.1 needs "
        f"{1e6 * overhead_of_shortest():.0f} us more in both, as a launch from Python takes.",
    ]


def lone_share(left_out: Case | None = None) -> float:
    known = [(case.work, case.over_fa2 or 0.0) for case in KNOWN if case is not left_out]
    return mean_lone_share(known, A100)


def foretold() -> list[float]:
    """The model over the paper, of each case by the lone share that the others are fitted by."""
    return [
        with_costs(case.work, replace(ASSUMED, lone=lone_share(case)))[0] / (case.over_fa2 or 0.0)
        for case in KNOWN
    ]


def with_costs(work: Work, costs: Costs = FITTED) -> tuple[float, float]:
    """Speedups over FlashAttention-2 and FlashDecoding."""
    names = FLASH_ATTENTION_2, FLASH_DECODING, LEAN
    plans = (SCHEDULERS[name](work, work, A100, costs) for name in names)
    fa2, flash_decoding, ours = (plan.seconds(work, A100, costs) for plan in plans)
    return fa2 / ours, flash_decoding / ours


def overhead_of_shortest() -> float:
    """Seconds that, added to both, make the published 1.1 of 24 heads and 1k keys."""
    (case,) = (c for c in FIGURE_7 if (c.heads, c.keys) == (24, K))
    plans = schedules(case.work, A100, FITTED)
    slow, fast = (
        plans[name].seconds(case.work, A100, FITTED) for name in (FLASH_ATTENTION_2, LEAN)
    )
    assert case.over_fa2 is not None
    return (slow - case.over_fa2 * fast) / (case.over_fa2 - 1)


def occupancy_columns() -> dict[str, Callable[[Row], str]]:
    def share(name: str, row: Row) -> str:
        return f"{100 * row['occupancy'][name]:.0f} %"

    return {f"{name}": partial(share, name) for name in SCHEDULERS}


def figure_1() -> Report:
    """Five SMs, two heads of five LeanTiles each."""
    gpu, work = Gpu("5 SMs", 5, 1.0, resident=1), uniform(5 * 256, 2)
    plans = {
        "FlashAttention-2": fixed_split(work, 1),
        "FlashDecoding, 2 parts": fixed_split(work, 2),
        "LeanAttention": SCHEDULERS[LEAN](work, work, gpu, TILES),
    }
    published = {"FlashAttention-2": 5, "FlashDecoding, 2 parts": 3, "LeanAttention": 2}
    rows = [
        {
            "name": name,
            "published": published[name],
            "ours": round(work.tiles.sum() / (5 * plan.occupancy(gpu))),
            "occupancy": plan.occupancy(gpu),
            "blocks": plan.blocks.tolist(),
        }
        for name, plan in plans.items()
    ]
    for row in rows:
        row["wrong"] = row["ours"] != row["published"]
    return comparison(
        "lean_figure_1",
        "LeanAttention, Figure 1: two heads of five LeanTiles on five SMs",
        rows,
        {
            "tiles per block": lambda row: " ".join(map(str, row["blocks"])),
            "tiles until the end": lambda row: str(row["ours"]),
            "published": lambda row: str(row["published"]),
            "occupancy": lambda row: f"{100 * row['occupancy']:.0f} %",
        },
        ("FlashDecoding also needs a second kernel, which merges.",),
    )


def figure_4(heads: Sequence[int] = (8, 16, 24, 32, 40, 56, 64, 96, 128)) -> Report:
    """The share of SMs that read, by heads, one sequence; the text has no number."""
    cases = [*(Case("4", count, 64 * K) for count in heads), Case("III-B", 128, 256 * K, gpus=8)]
    rows = [{**row, "ours": row["occupancy"][FLASH_ATTENTION_2]} for row in map(row_of, cases)]
    return comparison(
        "lean_figure_4",
        "LeanAttention, Figure 4: occupancy of an A100's 108 SMs at 64k keys",
        rows,
        occupancy_columns(),
        ("The paper gives curves without numbers; 128 heads on 864 SMs is its example in III-B.",),
    )


def advantage(gpu: Gpu = H200) -> Report:
    """Show cases in which no fixed number of parts that the host can choose is as fast."""
    ragged = Work(log_uniform_lengths(16, 512, 128 * K), 8, 128)
    room = uniform(128 * K, 8, 16, head_dim=128)
    cases: dict[str, tuple[Work, Work | None]] = {
        "16 equal sequences of 128k": (room, None),
        "16 sequences of 512 to 128k": (ragged, None),
        "64 sequences of 512 to 128k": (Work(log_uniform_lengths(64, 512, 128 * K), 8, 128), None),
        "16 of 512 to 128k, captured for 128k each": (ragged, room),
        "4 of 16k, captured for 128k each": (
            uniform(16 * K, 8, 4, head_dim=128),
            uniform(128 * K, 8, 4, head_dim=128),
        ),
        "1 sequence of 2k": (uniform(2 * K, 8, head_dim=128), None),
        "1 sequence of 64k": (uniform(64 * K, 8, head_dim=128), None),
    }
    rows = []
    for name, (work, known) in cases.items():
        ratios = ratios_to_lean(work, gpu, ASSUMED, known)
        rows.append({"name": name, "ours": ratios[BEST_SPLIT], "ratios": ratios})

    def ratio(name: str, row: Row) -> str:
        return number(row["ratios"][name])

    return comparison(
        "lean_advantage",
        f"Where LeanAttention's schedule is faster, simulated on an {gpu.name}",
        rows,
        {name: partial(ratio, name) for name in SCHEDULERS if name != LEAN},
        (
            "How many times as long as LeanAttention; 8 key heads of 128, with the assumed costs.",
            "A captured graph is launched with what the host knew when it was captured. The number "
            "of parts stays, while LeanAttention divides what lengths on the device say.",
            "The best fixed number of parts is searched with the lengths known, which a server "
            "would have to do at every step.",
        ),
    )


FIGURES: dict[str, Callable[[], Report]] = {
    "lean_figure_1": figure_1,
    "lean_figure_4": figure_4,
    "lean_figure_7": lambda: speedups("7", FIGURE_7),
    "lean_figure_8": lambda: speedups("8", FIGURE_8),
    "lean_figure_9": lambda: speedups("9", FIGURE_9),
    "lean_figure_10": lambda: speedups("10", FIGURE_10),
    "lean_advantage": advantage,
}
