# SPDX-License-Identifier: BSD-3-Clause
"""Variants of lean_decode's tiles and workers beside its own choice, for `benchmarks.tune`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tree_attention.reference.accuracy import Accuracy

from .measure import Load, Samples, load_warnings
from .plots import picture
from .program import progress_bar
from .report import Report, columns_of, environment, json_text

DEFAULT = "lean_decode"
# LeanAttention's tile by head_dim (arXiv:2405.10480, section IV-B), in keys.
PAPERS_TILE = {64: 256, 128: 128}

Call = Callable[[int], Any]  # with the number of the set of keys that it reads


@dataclass(frozen=True)
class Variant:
    """Zero, which is the default, is what lean_decode chooses."""

    tile: int = 0  # keys
    workers: int = 0
    stages: int = 0  # of the ring, on CUDA

    @property
    def name(self) -> str:
        parts = [f"{self.tile} keys"] if self.tile else []
        parts += [f"{self.stages} stages"] if self.stages else []
        parts += [f"{self.workers} workers"] if self.workers else []
        return ", ".join(parts) or DEFAULT


@dataclass(frozen=True)
class Problem:
    """A case with its tensors."""

    call: Callable[[Variant, int], tuple[Tensor, Tensor]]
    probes: Mapping[str, Call]  # each reads `probe_bytes`, as fast as the machine can
    probe_bytes: int
    # Samples, and reasons of what cannot run, of calls that take turns for so many seconds.
    time: Callable[[Mapping[str, Call], float], tuple[Mapping[str, Samples], Mapping[str, str]]]
    accuracy: Callable[[Tensor, Tensor], Accuracy]


class Case(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def io_bytes(self) -> int: ...


class Sweep(Protocol):
    """What a device has of the sweep."""

    name: str  # of the report
    title: str

    def environment(self) -> dict[str, Any]: ...
    def variants(self, head_dim: int) -> list[Variant]: ...
    def own(self, head_dim: int) -> Variant:
        """The variant that is lean_decode's own choice: timed twice, it shows the noise."""
        ...

    def problem(self, case: Any) -> Problem: ...


def measured_row(case: Case, sweep: Sweep, seconds: float) -> dict[str, Any]:
    problem, own = sweep.problem(case), sweep.own(case.head_dim)
    variants = {v.name: v for v in (Variant(), *sweep.variants(case.head_dim))}
    calls: dict[str, Call] = {name: partial(problem.call, v) for name, v in variants.items()}

    def timed(functions: Mapping[str, Call], seconds: float) -> Any:
        # The first call of a round is not looked at: its threads wake later, and what follows a
        # probe finds less of its code in the caches. And with it the functions are not two, which
        # would each read only one of two sets.
        return problem.time({"first": calls[DEFAULT], **functions}, seconds)

    with Load() as load:
        samples, failed = timed(calls, seconds)
        if DEFAULT not in samples:
            raise RuntimeError(f"{case.name}: lean_decode: {failed[DEFAULT]}")
        ours = samples[DEFAULT].median
        ratios = {name: samples[name].median / ours for name in calls if name in samples}
        best = min(ratios, key=lambda name: ratios[name])
        # The least of many medians is too small by chance.
        again, _ = timed({name: calls[name] for name in (DEFAULT, best)}, seconds / 2)
        read, _ = timed({DEFAULT: calls[DEFAULT], **problem.probes}, seconds / 4)
    accuracies = {name: problem.accuracy(*samples[name].result[:2]) for name in ratios}
    probes = [read[name].median for name in problem.probes if name in read]

    read_share = None
    if probes:
        read_share = case.io_bytes / read[DEFAULT].median / (problem.probe_bytes / min(probes))

    def of(chosen: Callable[[Variant], bool]) -> list[float]:
        return [ratio for name, ratio in ratios.items() if chosen(variants[name])]

    return {
        "name": case.name,
        "times": {name: samples[name].to_json() for name in ratios},
        "failed": failed,
        "ratios": ratios,
        "read_share": read_share,
        "same": ratios[own.name],
        "tiles": of(lambda v: v.tile > 0 and v.workers == 0),
        "workers": of(lambda v: v.tile in (0, own.tile) and v.stages in (0, own.stages)),
        "papers_tile": min(of(lambda v: v.tile == PAPERS_TILE[case.head_dim] and not v.workers)),
        "best": best,
        "best_again": again[best].median / again[DEFAULT].median,
        "other_load": load.others,
        "o_error": max(accuracy.o_error for accuracy in accuracies.values()),
        "wrong": [name for name, accuracy in accuracies.items() if not accuracy.right],
        "variants": {name: asdict(variants[name]) for name in ratios},
    }


def run(
    cases: Sequence[Case], sweep: Sweep, seconds: float, budget: float | None, out: Path | None
) -> Report:
    """`seconds` is the timed part of each case, without the best variant and the probe, which take
    half and a quarter as long. A case that would begin after `budget` seconds is left out and
    listed. The rows so far are in the JSON file in `out` after each of them: a kernel that hangs
    leaves what was measured before."""
    begin, rows, skipped = time.monotonic(), [], []
    with torch.inference_mode(), progress_bar(True) as progress:
        task = progress.add_task("tune", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            if budget is not None and time.monotonic() - begin > budget:
                skipped.append(f"left out, the time was up: {case.name}")
                continue
            rows.append(measured_row(case, sweep, seconds))
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{sweep.name}.json").write_text(json_text({"rows": rows}))
            progress.advance(task)
    least = min(rows, key=lambda row: row["best_again"])
    return Report(
        name=sweep.name,
        title=sweep.title,
        notes=NOTES,
        environment=environment(**sweep.environment()),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        warnings=[*load_warnings([row["other_load"] for row in rows]), *skipped],
        summary=[
            f"The most that a variant saves is {100 * max(0, 1 - least['best_again']):.1f} %: "
            f"{least['best']}, {least['name']}."
        ],
        draw=draw,
    )


NOTES = (
    "A row is named dtype, query/kv heads, head_dim, batch, keys. Times are medians of calls that "
    "take turns in one run; all other figures are times over that of lean_decode, which chooses "
    "for itself.",
    "% BW is the share of a probe that only reads the same memory, in turn with lean_decode. Same: "
    "lean_decode's own choice, timed once more, which shows the noise. Tiles: the least and the "
    "most over the sizes of a tile; workers: over the numbers of workers. Paper's tile: 256 keys "
    "for a head_dim of 64, 128 for 128. Best: the variant with the least time; again: its time "
    "when only these two take turns.",
    "error is the largest of o over all variants, relative to the row's largest magnitude, against "
    "float64; more than twice that of plain PyTorch plus one rounding is WRONG.",
)


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "case": lambda row: row["name"],
    "ours us": lambda row: f"{row['times'][DEFAULT]['median_us']:,.1f}",
    "% BW": lambda row: f"{100 * row['read_share']:.0f}" if row["read_share"] else "-",
    "same": lambda row: f"{row['same']:.3f}",
    "tiles": lambda row: _range(row["tiles"]),
    "paper's tile": lambda row: f"{row['papers_tile']:.3f}",
    "workers": lambda row: _range(row["workers"]),
    "best": lambda row: row["best"],
    "best /ours": lambda row: f"{row['ratios'][row['best']]:.3f}",
    "again": lambda row: f"{row['best_again']:.3f}",
    "error": lambda row: f"{row['o_error']:.1e}",
    "right": lambda row: "WRONG" if row["wrong"] else "yes",
}


def draw(report: Report, path: Path) -> None:
    """For each row a line for each tile, over the number of workers."""
    height, columns = -(-len(report.rows) // 3), min(3, len(report.rows))
    size = (5 * columns, 2.8 * height)
    with picture(path, size, (height, columns), report.title) as grid:
        for axes, row in zip(grid.flat, report.rows, strict=False):
            variants = row["variants"].values()
            workers = sorted({v["workers"] for v in variants})
            for tile, stages in sorted({(v["tile"], v["stages"]) for v in variants}):
                points = {
                    v["workers"]: row["ratios"][name]
                    for name, v in row["variants"].items()
                    if (v["tile"], v["stages"]) == (tile, stages)
                }
                places = [workers.index(n) for n in sorted(points)]
                label = Variant(tile, stages=stages).name
                axes.plot(
                    places, [points[n] for n in sorted(points)], "o-", ms=3, lw=1, label=label
                )
            axes.set_xticks(range(len(workers)), ["own choice", *map(str, workers[1:])], fontsize=7)
            axes.set_title(row["name"], fontsize=8)
            axes.set(xlabel="workers", ylabel="time / lean_decode's")
            axes.grid(alpha=0.3)
        grid.flat[0].legend(fontsize=6)
        for axes in grid.flat[len(report.rows) :]:
            axes.axis("off")
