# SPDX-License-Identifier: BSD-3-Clause
"""A plan in words and numbers."""

from __future__ import annotations

from .models import Attention, Model
from .plans import MAX_CONTEXT, Plan, Row

FORMS_HEADINGS = (
    *("form", "weights GB", "cache GB", "exchange GB", "longest context"),
    *("ms per token", "of it exchange", "prefill s", "of it exchange"),
)
NOTHING = "-"  # in a cell


def title(plan: Plan) -> str:
    model, work = plan.model, plan.work
    several = f"{work.sequences} sequences of " if work.sequences > 1 else ""
    tokens, ranks = _count(work.context, "token"), _count(plan.ranks, "rank")
    return f"{model.name}, cache in {model.kv_dtype}, {several}{tokens}, {ranks}"


def sources(plan: Plan) -> list[str]:
    """What the numbers are made from: the model, the machine and the link."""
    machine, link = plan.hosts.machine, plan.hosts.link
    return [
        _weights(plan.model),
        _cache(plan.model),
        f"Rank: {machine.memory / 1e9:,.0f} GB at {machine.memory_bandwidth / 1e9:,.0f} GB/s, "
        f"{machine.arithmetic / 1e12:,.0f} TFLOP/s ({machine.source}).",
        f"Link: {link.bandwidth / 1e9:,.3g} GB/s, {1e6 * link.round_seconds:,.3g} us a round "
        f"({link.source}).",
    ]


def _weights(model: Model) -> str:
    weights = model.weights
    experts = ""
    if weights.experts:
        experts = (
            f", of which a token needs {weights.active / 1e9:,.3g} billion, with {weights.chosen} "
            f"of {weights.num_experts} experts in a layer"
        )
    return (
        f"Model: {weights.total / 1e9:,.3g} billion weights in {number(weights.num_bytes / 1e9)} GB"
        f"{experts}."
    )


def _cache(model: Model) -> str:
    def part(layers: Attention) -> str:
        num_bytes = layers.layers * layers.token_bytes(model.kv_dtype)
        tokens = "a token"
        if layers.window is not None:
            tokens = f"for each of the last {layers.window:,} tokens"
        return f"{num_bytes:,} bytes {tokens} in {_count(layers.layers, 'layer')}"

    ordered = sorted(model.attention, key=lambda layers: layers.window is not None)
    parts = [part(layers) for layers in ordered]
    if model.state_layers:
        states = f"{model.states_bytes / 1e6:,.3g} MB for states of any context"
        parts.append(f"{states} in {_count(model.state_layers, 'layer')}")
    return f"Cache: {'; '.join(parts)}."


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def forms(plan: Plan) -> list[tuple[bool, list[str]]]:
    """The cells of every form, and whether it is the best."""
    best = plan.best()
    return [(row == best, _form_cells(plan, row)) for row in plan.rows()]


def _form_cells(plan: Plan, row: Row) -> list[str]:
    if row.obstacle:
        return [row.name, *[NOTHING] * 4, row.obstacle, *[NOTHING] * 3]
    longest = plan.longest(row.form)
    times = [row.refusal, *[NOTHING] * 3]
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


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"
