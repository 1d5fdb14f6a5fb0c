# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention plan`: memory and time of a model on several ranks, by arithmetic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from .._numbers import in_digits
from ..planning.arithmetic import ALL_FORMS, MAX_CONTEXT, MAX_RANKS, Plan, Work
from ..planning.machines import (
    BUS_SECONDS,
    HOST,
    LINKS,
    MACHINES,
    SUSTAINED,
    Hosts,
    Link,
    Machine,
    fitted_link,
    link_of,
)
from ..planning.models import KV_DTYPES, NAMED, WEIGHT_DTYPES, Model
from ..planning.unequal_plan import UnequalPlan
from ..shares import AUTO, Shares, as_shares
from .far import add_far_options, check_far_options
from .models import find_model
from .plan_hosts import show_hosts
from .shares import given_shares
from .usage import UsageError, argument_parser, plain_console, printable, tokens_of

if TYPE_CHECKING:
    from ..exchange import CostTable

HEADINGS = (
    *("what is split (*: fastest token)", "weights GB", "cache GB", "longest context"),
    *("ms per token", "in exchange", "prefill s", "in exchange"),
)
OF_FAR_KEYS = (*HEADINGS[:3], "on host GB", *HEADINGS[3:])


def main(arguments: list[str]) -> int:
    parser = argument_parser(
        "plan",
        "Estimates, for every way to split a model over ranks, the memory of a rank, the time per "
        "token and the time to read a prompt, from data sheets; nothing is loaded or run.",
        "plan --model llama-3.1-8b --context 1M --ranks 16 --machine cpu --link 10gbe",
        "plan --model DIR --context 128k --ranks 2 --machine cpu --calibration costs.json",
        "plan --model DIR --context 128k --hosts costs.json",
        "plan --model llama-3.1-8b --context 32k --ranks 4 --machine cpu --sequences 16",
        "plan --model llama-3.1-8b --context 1M --ranks 1 --machine h100 --far cpu "
        "--near-tokens 64k",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|NAME",
        help=f"Model: a directory with its config.json, or one of the shapes {', '.join(NAMED)}.",
    )
    parser.add_argument(
        "--context",
        required=True,
        metavar="TOKENS",
        help="Number of tokens of the prompt, which are in the cache when a new token is timed, "
        "such as 131072, 128k (of 1,024 tokens) or 1M (of 1,024 k).",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="Number of ranks, normally one for each CPU socket or GPU (default: as many as "
        "--hosts or several --machine name).",
    )
    machines = parser.add_mutually_exclusive_group(required=True)
    machines.add_argument(
        "--machine",
        "--gpu",
        choices=MACHINES,
        action="append",
        help="Data sheet of the socket or GPU that each rank has; once for each rank where they "
        "differ.",
    )
    machines.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="Table that `calibrate` wrote on your ranks, in place of --machine: speed and memory "
        "of each rank are those measured, and so is the link if --link is left out.",
    )
    parser.add_argument(
        "--shares",
        metavar="even|auto|A,B,...",
        help="How much of the weights and of the cache each rank gets: the same (even), an integer "
        "for each rank, such as 3,1, or those with which a token takes the least time; for "
        "--hosts and for several --machine (default: auto).",
    )
    link = parser.add_mutually_exclusive_group()
    link.add_argument(
        "--link",
        choices=LINKS,
        help="Data sheet of the link between ranks (default: the usual link of the machine).",
    )
    link.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="Table that `calibrate` wrote on your ranks: the link is fitted to its times, and "
        "--link is left out.",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="bf16",
        help="Dtype of the key/value cache (default: bf16).",
    )
    parser.add_argument(
        "--weight-dtype",
        choices=WEIGHT_DTYPES,
        help="Dtype of the weights of linear layers and experts (default: as they are stored).",
    )
    add_far_options(parser)
    parser.add_argument(
        "--sequences",
        type=int,
        default=1,
        metavar="N",
        help="Number of sequences that decode at the same time, over all ranks (default: 1).",
    )
    parsed = parser.parse_args(arguments)
    check_far(parsed)
    if parsed.hosts is None and len(parsed.machine) == 1:
        show(plan_of(parsed))
    else:
        plan = plan_of_hosts(parsed)
        of_model = sources_of_model(plan.model, plan.work, len(plan.machines))
        show_hosts(plan, of_model, source_of_link(plan.link))
    return 0


def check_far(arguments: argparse.Namespace) -> None:
    """Raises UsageError for far keys of machines that have none."""
    check_far_options(arguments)
    machines = [MACHINES[name] for name in arguments.machine or ()]
    if arguments.far and (len(machines) != 1 or not machines[0].bus):
        names = ", ".join(name for name, machine in MACHINES.items() if machine.bus)
        raise UsageError(
            f"--far cpu is for equal GPUs with a host each: give one --machine of {names}, or "
            "leave --far out"
        )


def plan_of(arguments: argparse.Namespace) -> Plan:
    if arguments.ranks is None:
        raise UsageError("--ranks is missing: how many ranks have this --machine?")
    if arguments.shares is not None:
        raise UsageError("--shares is for ranks that differ: give --hosts, or --machine for each")
    model, work = what_is_planned(arguments)
    machine = MACHINES[arguments.machine[0]]
    link = link_between(arguments, [machine], arguments.ranks)
    return Plan(model, Hosts(machine, link), arguments.ranks, work)


def plan_of_hosts(arguments: argparse.Namespace) -> UnequalPlan:
    model, work = what_is_planned(arguments)
    if arguments.hosts is None:
        source, machines = "several --machine", [MACHINES[name] for name in arguments.machine]
        link = link_between(arguments, machines, len(machines))
    else:
        source = f"--hosts {arguments.hosts}"
        if arguments.calibration is not None:
            raise UsageError("--calibration is not needed: the table of --hosts has its link")
        from ..planning.measuring import as_machine  # not above: the rest needs no torch

        costs, fitted = _measured_link("--hosts", arguments.hosts)
        if not costs.machines:
            raise UsageError(
                f"{source}: an older version wrote this table, which does not say how fast hosts "
                "are; write a new one with `python -m tree_attention calibrate`"
            )
        machines = [as_machine(host) for host in costs.machines]
        link = fitted if arguments.link is None else LINKS[arguments.link]
    count = len(machines)
    if arguments.ranks not in (None, count):
        raise UsageError(
            f"--ranks must be left out or {count:,}, the number of ranks of {source}, got "
            f"{arguments.ranks:,}"
        )
    return UnequalPlan(model, tuple(machines), link, work, _shares(arguments.shares, count))


def _shares(text: str | None, count: int) -> Shares | Literal["auto"]:
    if text is None or text == AUTO:
        return "auto"
    try:
        return as_shares("plan", "--shares", given_shares(text), count)
    except ValueError as error:
        raise UsageError(str(error).removeprefix("plan: ")) from error


def what_is_planned(arguments: argparse.Namespace) -> tuple[Model, Work]:
    context = tokens_of("--context", arguments.context)
    for option, count in (("--ranks", arguments.ranks), ("--sequences", arguments.sequences)):
        if count is not None and not 1 <= count <= MAX_RANKS:
            raise UsageError(f"{option} must be 1 to {MAX_RANKS:,}, got {count:,}")
    try:
        model = find_model(arguments.model, arguments.near_tokens)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    model = replace(model, kv_dtype=arguments.kv_dtype)
    if arguments.weight_dtype is not None:
        model = replace(model, weights=model.weights.quantised(arguments.weight_dtype))
    return model, Work(context, arguments.sequences)


def link_between(arguments: argparse.Namespace, machines: Sequence[Machine], ranks: int) -> Link:
    """The link that options name, or the slowest of the machines' usual links."""
    if arguments.calibration is not None:
        return _measured_link("--calibration", arguments.calibration)[1]
    if arguments.link is not None:
        return LINKS[arguments.link]
    return min((LINKS[link_of(x, ranks)] for x in machines), key=lambda link: link.bandwidth)


def _measured_link(option: str, path: Path) -> tuple[CostTable, Link]:
    from ..exchange import CostTable  # not above: the rest needs no torch

    try:
        costs = CostTable.load(path)
        return costs, fitted_link(costs, path.name)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def show(plan: Plan) -> None:
    console = plain_console(width=None if sys.stdout.isatty() else 120)
    table, best = Table(box=None, header_style=""), plan.best()
    headings = HEADINGS if plan.model.near_tokens is None else OF_FAR_KEYS
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=not i)
    for form in ALL_FORMS:
        name, *numbers = cells(plan, form)
        table.add_row(name + " *" * (form == best), *map(Text, numbers))
    console.print(*map(printable, sources(plan)), "", sep="\n")
    console.print(table, soft_wrap=False)
    # The reasons are no user's words, and are read.
    legend = "T is tensor_parallel_size, the number of ranks that split the heads."
    console.print("", legend, *plan.verdicts(), sep="\n", soft_wrap=False)


def sources(plan: Plan) -> list[str]:
    """Return what the numbers are made from: the work, the model, the machine and the link."""
    machine = plan.hosts.machine
    return [
        *sources_of_model(plan.model, plan.work, plan.ranks),
        f"Rank: {machine.memory / 1e9:,.0f} GB at {machine.memory_bandwidth / 1e9:,.0f} GB/s, "
        f"{SUSTAINED:.0%} of {machine.arithmetic / 1e12:,.0f} TFLOP/s ({machine.name}, "
        f"{machine.source}).",
        source_of_link(plan.hosts.link),
        *(() if plan.model.near_tokens is None else [source_of_far_keys(plan)]),
    ]


def source_of_far_keys(plan: Plan) -> str:
    near, bus = plan.model.near_tokens, plan.hosts.machine.bus
    return (
        f"Far keys: of all but the newest {near:,} tokens, on a host for each rank: "
        f"{HOST.memory / 1e9:,.0f} GB at {HOST.memory_bandwidth / 1e9:,.0f} GB/s, bus "
        f"{bus / 1e9:,.0f} GB/s and {1e6 * BUS_SECONDS:,.0f} us per layer ({HOST.source}; those of "
        "the bus, too)."
    )


def source_of_link(link: Link) -> str:
    return (
        f"Link: {link.bandwidth / 1e9:,.3g} GB/s, {1e6 * link.round_seconds:,.3g} us a round "
        f"({link.source})."
    )


def sources_of_model(model: Model, work: Work, ranks: int) -> list[str]:
    weights, several = model.weights, f"{work.sequences} sequences of " * (work.sequences > 1)
    experts = f", {weights.chosen} of {weights.num_experts} experts for a token"
    caches = []
    for x in model.attention:
        tokens = f"for each of the last {x.window:,} tokens" if x.window else "a token"
        num_bytes = x.layers * x.token_bytes(model.kv_dtype)
        caches.append(f"{num_bytes:,} bytes {tokens} in {_count(x.layers, 'layer')}")
    if model.states_bytes:
        caches.append(f"{model.states_bytes / 1e6:,.3g} MB for states of any context")
    size = in_digits(weights.num_bytes / 1e9)
    return [
        f"{model.name}, cache in {model.kv_dtype}, {several}{_count(work.context, 'token')}, "
        f"{_count(ranks, 'rank')}",
        f"Model: {weights.total / 1e9:,.3g} billion weights in {size} GB"
        f"{experts if weights.experts else ''}.",
        f"Cache: {'; '.join(caches)}.",
    ]


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def cells(plan: Plan, form: str) -> list[str]:
    """Return the row of a form: its numbers, or where it has none the reason."""
    split, refusal = plan.split(form), plan.refusal(form)
    held = [split.weights_bytes, split.cache_bytes]
    if plan.model.near_tokens is not None:
        held.append(split.host_bytes)
    if split.obstacle:
        return [form, *"-" * len(held), "-", refusal, *"---"]
    longest = plan.longest(form)
    fits = f"{longest >> 10:,}k{'+' * (longest == MAX_CONTEXT)}" if longest else "none"
    sizes = [in_digits(size / 1e9) for size in held]
    if refusal:
        return [form, *sizes, fits, refusal, *"---"]
    token, prefill = split.token_seconds(plan.hosts), split.prefill_seconds(plan.hosts)
    of_token, of_prefill = (f"{x.exchange / x.total:.0%}" for x in (token, prefill))
    times = [in_digits(1e3 * token.total), of_token, in_digits(prefill.total), of_prefill]
    return [form, *sizes, fits, *times]
