# SPDX-License-Identifier: BSD-3-Clause
"""Printing of a plan for machines that differ: a row for each form, and of the fastest one a row
for each rank."""

import math
import sys
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from .._numbers import in_digits
from ..planning.arithmetic import FORMS
from ..planning.machines import SUSTAINED, Machine
from ..planning.unequal import in_numbers
from ..planning.unequal_plan import UnequalPlan
from ..shares import EQUAL
from .usage import plain_console, printable

OF_FORMS = (
    *("what is split (*: fastest token)", "shares", "ms per token", "in exchange"),
    *("with equal shares", "prefill s", "in exchange"),
)
OF_RANKS = (
    *("rank", "weights GB", "cache GB", "of GB", "busy: ms per token", "s per prompt"),
    "ms per token without it",
)


def show_hosts(plan: UnequalPlan, of_model: Sequence[str], of_link: str) -> None:
    console = plain_console(width=None if sys.stdout.isatty() else 120)
    sources = [*of_model, *of_machines(plan.machines), of_link]
    console.print(*map(printable, sources), "", sep="\n")
    forms = [[form + " *" * (form == plan.best), *of_form(plan, form)] for form in FORMS]
    console.print(_table(OF_FORMS, forms), soft_wrap=False)
    if plan.best is not None:
        console.print(f"\nOf each rank, with {plan.best} split:")
        ranks = [of_rank(plan, plan.best, rank) for rank in range(len(plan.machines))]
        console.print(_table(OF_RANKS, ranks), soft_wrap=False)
    legend = "T is tensor_parallel_size, the number of ranks that split the heads."
    console.print("", legend, *map(printable, plan.verdicts()), sep="\n", soft_wrap=False)


def of_machines(machines: Sequence[Machine]) -> list[str]:
    """Return a line for the machine of each rank."""
    return [
        f"Rank {rank}: {in_digits(x.memory / 1e9)} GB at "
        f"{in_digits(x.memory_bandwidth / 1e9)} GB/s, "
        f"{in_digits(SUSTAINED * x.arithmetic / 1e12)} TFLOP/s{_of_layers(x)} "
        f"({x.name}, {x.source})."
        for rank, x in enumerate(machines)
    ]


def _of_layers(machine: Machine) -> str:
    seconds = machine.layer_seconds
    return f", {in_digits(1e3 * seconds)} ms a layer for small operations" if seconds else ""


def of_form(plan: UnequalPlan, form: str) -> list[str]:
    """The row of a form: its numbers, or where it has none the reason."""
    if refusal := plan.refusal(form):
        return ["-", refusal, *"----"]
    group, shares, token, prompt = (
        plan.groups[form],
        plan.shares(form),
        plan.token(form),
        plan.prompt(form),
    )
    even = f"{in_digits(1e3 * group.token_seconds(EQUAL))} ms" if group.fits(EQUAL) else "no room"
    return [
        in_numbers(shares),
        in_digits(1e3 * token.total),
        f"{token.exchange / token.total:.0%}",
        even,
        in_digits(prompt.total),
        f"{prompt.exchange / prompt.total:.0%}",
    ]


def of_rank(plan: UnequalPlan, form: str, rank: int) -> list[str]:
    """The row of a rank."""
    group, shares, machine = plan.groups[form], plan.shares(form), plan.machines[rank]
    split, without = group.split(shares, rank), "-"
    if len(plan.machines) > group.tensor_parallel_size:
        seconds = group.seconds_without[rank]
        without = "no room" if seconds == math.inf else in_digits(1e3 * seconds)
    return [
        f"{rank} ({machine.name})",
        *(in_digits(x / 1e9) for x in (split.weights_bytes, split.cache_bytes, machine.memory)),
        in_digits(1e3 * group.rank_token(shares, rank).local),
        in_digits(plan.each_prompt(form)[rank].local),
        without,
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="")
    for i, heading in enumerate(headings):
        is_whole = i == 0 or heading == "shares"
        table.add_column(heading, justify="right" if i else "left", no_wrap=is_whole)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
