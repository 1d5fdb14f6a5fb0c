# SPDX-License-Identifier: BSD-3-Clause
"""A plan in words and numbers, for the terminal and for the page alike."""

from __future__ import annotations

from .plans import AS_IT_IS, MAX_CONTEXT, Plan, Row, changes

FORMS_HEADINGS = (
    *("form", "weights GB", "cache GB", "exchange GB", "longest context"),
    *("ms per token", "of it exchange", "prefill s", "of it exchange"),
)
CHANGES_HEADINGS = ("with", "best form", "GB per rank", "ms per token", "prefill s")


def title(plan: Plan) -> str:
    model, work = plan.model, plan.work
    several = f"{work.sequences} sequences of " if work.sequences > 1 else ""
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    return f"{model.name}, cache in {model.kv_dtype}, {several}{work.context:,} tokens, {ranks}"


def sources(plan: Plan) -> list[str]:
    machine, link = plan.hosts.machine, plan.hosts.link
    return [
        f"Rank: {machine.memory / 1e9:,.0f} GB at {machine.memory_bandwidth / 1e9:,.0f} GB/s, "
        f"{machine.arithmetic / 1e12:,.0f} TFLOP/s ({machine.source}).",
        f"Link: {link.bandwidth / 1e9:,.3g} GB/s, {1e6 * link.round_seconds:,.3g} us a round "
        f"({link.source}).",
    ]


def forms(plan: Plan) -> list[tuple[bool, list[str]]]:
    """The cells of every form, and whether it is the best."""
    best = plan.best()
    return [(row == best, _form_cells(plan, row)) for row in plan.rows()]


def _form_cells(plan: Plan, row: Row) -> list[str]:
    longest = plan.longest(row.form)
    times = [row.refusal, "", "", ""]
    if not row.refusal:
        times = [
            *(number(1e3 * row.token.total), share(row.token.exchange, row.token.total)),
            *(number(row.prefill.total), share(row.prefill.exchange, row.prefill.total)),
        ]
    return [
        row.name,
        *(number(num_bytes / 1e9) for num_bytes in (row.weights, row.cache, row.exchange)),
        f"{longest >> 10:,}k{'+' * (longest == MAX_CONTEXT)}" if longest else "none",
        *times,
    ]


def change_rows(plan: Plan) -> list[tuple[bool, list[str]]]:
    """The cells of every change, and whether it is none."""
    return [
        (
            text == AS_IT_IS,
            [text, *(["nothing fits", "", "", ""] if row is None else _best_cells(row))],
        )
        for text, row in changes(plan)
    ]


def _best_cells(row: Row) -> list[str]:
    times = number(1e3 * row.token.total), number(row.prefill.total)
    return [row.name, number(row.held / 1e9), *times]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"
