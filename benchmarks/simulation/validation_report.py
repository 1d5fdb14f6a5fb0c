# SPDX-License-Identifier: BSD-3-Clause
"""Predictions beside measured rows: table, medians and picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..harness.report import Column, Report, environment
from .validation import Measured, Prediction, Software, median_error

NOTES = (
    "A row is one way in one configuration LINK/RANKS of an emulated cluster, with batch B and n "
    "keys per rank and sequence; measured is the median of its calls. Error is that of the "
    "simulated time, positive where it is longer.",
    "Delays and bandwidths are the links' own. What software takes is fitted to the configurations "
    "marked so, and predicts the others: Python, the library's calls and messages, and the relay "
    "that carries all packets, on processors that the ranks share; see `Software`.",
)


def report_of(
    predictions: Sequence[Prediction], software: Software | None, fitted: Sequence[str]
) -> Report:
    others = [p for p in predictions if p.measured.configuration not in fitted]
    return Report(
        name="simulation_validation",
        title="Simulated against measured times on emulated clusters",
        notes=NOTES,
        environment=environment(),
        rows=[
            {
                "name": _name(p.measured),
                **vars(p.measured),
                "is_fitted": p.measured.configuration in fitted,
                "simulated_seconds": p.seconds,
                "error": p.error,
                "wrong": False,
            }
            for p in predictions
        ],
        columns=_columns(predictions),
        summary=[
            *([] if software is None else [f"Fitted to {', '.join(fitted)}: {software}."]),
            *_medians(predictions, lambda m: m.configuration, fitted),
            *_medians(others, lambda m: m.strategy),
            *_medians(others, lambda m: f"B = {m.batch}"),
            *_total(others),
        ],
        more={"software": None if software is None else vars(software), "fitted": list(fitted)},
        draw=lambda report, path: _draw(predictions, fitted, path),
    )


def _name(row: Measured) -> str:
    return f"{row.configuration} B={row.batch} n={row.keys} {row.strategy}"


def _columns(predictions: Sequence[Prediction]) -> list[Column]:
    return [
        Column("case", [_name(p.measured) for p in predictions]),
        Column("measured ms", [f"{1e3 * p.measured.seconds:,.3f}" for p in predictions]),
        Column("simulated ms", [f"{1e3 * p.seconds:,.3f}" for p in predictions]),
        Column("error", [f"{p.error:+.0%}" for p in predictions]),
    ]


def _medians(
    predictions: Sequence[Prediction],
    key: Callable[[Measured], str],
    fitted: Sequence[str] = (),
) -> Iterable[str]:
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(key(prediction.measured), []).append(prediction)
    for name, group in groups.items():
        mark = " (fitted)" if name in fitted else ""
        signed = median(p.error for p in group)
        yield f"{name}{mark}: median error {median_error(group):.0%}, signed {signed:+.0%}"


def _total(others: Sequence[Prediction]) -> Iterable[str]:
    if others:
        near = sum(abs(p.error) <= 0.2 for p in others)
        yield (
            f"Median error of {len(others)} predictions: {median_error(others):.0%}; {near} are "
            "within 20 %."
        )


def _draw(predictions: Sequence[Prediction], fitted: Sequence[str], path: Path) -> None:
    """Measured over simulated times; in the band they differ by 20 % at most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(p.measured.link for p in predictions))
    ways = list(dict.fromkeys(p.measured.strategy for p in predictions))
    figure, grid = pyplot.subplots(1, len(links), figsize=(4.6 * len(links), 5.4), squeeze=False)
    for axes, link in zip(grid.flat, links, strict=True):
        of_link = [p for p in predictions if p.measured.link == link]
        for i, way in enumerate(ways):
            for is_fitted in (False, True):
                points = [
                    (1e3 * p.seconds, 1e3 * p.measured.seconds)
                    for p in of_link
                    if p.measured.strategy == way
                    and (p.measured.configuration in fitted) == is_fitted
                ]
                style: dict[str, Any] = {"fillstyle": "none"} if is_fitted else {"label": way}
                if points:
                    xs, ys = zip(*points, strict=True)
                    axes.plot(xs, ys, "o", color=f"C{i}", markersize=4, **style)
        times = [1e3 * t for p in of_link for t in (p.seconds, p.measured.seconds)]
        ends = [min(times), max(times)]
        axes.plot(ends, ends, "k-", linewidth=0.6)
        axes.fill_between(
            ends, [x / 1.2 for x in ends], [x / 0.8 for x in ends], alpha=0.1, color="k"
        )
        axes.set(xscale="log", yscale="log", xlabel="simulated ms", ylabel="measured ms")
        axes.set_title(link, loc="left")
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.suptitle("Simulated against measured; hollow: fitted; band: 20 %")
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
