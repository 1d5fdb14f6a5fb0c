# SPDX-License-Identifier: BSD-3-Clause
"""A plan as one HTML file, with its plots inside, which fetches nothing."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import tables
from .plans import ALL_FORMS, MAX_CONTEXT, Plan, Row, verdicts

_STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left; white-space: nowrap }
tr.best { font-weight: bold }
img { width: 100% }
"""


def page(plan: Plan) -> str:
    title = escape(tables.title(plan))
    picture = base64.b64encode(plots(plan)).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>
<body>
<h1>{title}</h1>
{_paragraphs(tables.sources(plan))}
{_table(tables.FORMS_HEADINGS, tables.forms(plan))}
{_paragraphs(verdicts(plan))}
<img alt="Times and memory by context and ranks" src="data:image/svg+xml;base64,{picture}">
<h2>What to change first</h2>
{_table(tables.CHANGES_HEADINGS, tables.change_rows(plan))}
</body>
</html>
"""


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _table(headings: Sequence[str], rows: Sequence[tuple[bool, list[str]]]) -> str:
    lines = ["<table>", "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in headings) + "</tr>"]
    for is_best, cells in rows:
        marked = ' class="best"' if is_best else ""
        lines.append(f"<tr{marked}>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def plots(plan: Plan) -> bytes:
    """SVG: what every form takes and keeps, by the context and by the ranks."""
    here = round(math.log2(plan.work.context))
    contexts = [1 << n for n in range(max(0, here - 8), here + 5) if 1 << n <= MAX_CONTEXT]
    by_context = [plan.at(context) for context in contexts]
    ranks = [1 << n for n in range(7)]
    by_ranks = [replace(plan, ranks=count) for count in ranks]
    figure = Figure(figsize=(13, 9))
    panels = figure.subplots(2, 2).flat
    for axes, (what, xs, plans) in zip(
        panels,
        (
            ("ms per token", contexts, by_context),
            ("prefill s", contexts, by_context),
            ("GB per rank", contexts, by_context),
            ("ms per token", ranks, by_ranks),
        ),
        strict=True,
    ):
        _draw(axes, what, xs, plans)
        is_context = xs is contexts
        axes.axvline(plan.work.context if is_context else plan.ranks, color="0.8", zorder=0)
        axes.set_xlabel("tokens of context" if is_context else "ranks on this link")
        if what == "GB per rank":
            axes.axhline(plan.hosts.machine.memory / 1e9, color="black", linestyle=":")
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="upper center", ncols=4)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    written = io.BytesIO()
    figure.savefig(written, format="svg")
    return written.getvalue()


def _draw(axes: Axes, what: str, xs: Sequence[int], plans: Sequence[Plan]) -> None:
    """A line for each form, with a gap where the ranks cannot take it."""
    for i, form in enumerate(ALL_FORMS):
        rows = [plan.row(form) for plan in plans]
        # Some forms are equal: wider lines lie under narrower ones.
        width = 1.2 + 0.7 * (len(ALL_FORMS) - i)
        values = [_value(row, what) for row in rows]
        axes.plot(xs, values, ".-", label=rows[0].name, linewidth=width, alpha=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)


def _value(row: Row, what: str) -> float:
    if row.obstacle or (row.refusal and what != "GB per rank"):
        return math.nan
    if what == "GB per rank":
        return row.held / 1e9
    return 1e3 * row.token.total if what == "ms per token" else row.prefill.total
