# SPDX-License-Identifier: BSD-3-Clause
"""Rows for people: the columns, a line while it runs, and the conditions of the measurement."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..harness.report import Column
from . import libraries, peers
from .cases import OURS
from .merge import PYTORCH
from .rows import best_peer

NOTES = (
    "A row is named dtype (/ that of a cache of 8 bits), query/kv heads, head_dim (/ that of "
    "latent values), batch, keys (of slots), queries, window, page size, layout of the cache if "
    "it is not [batch, heads, slots, dim].",
    "us: one call, by replays of a captured graph of back-to-back calls; median of interleaved "
    "replays, p10 to p90 beside it. eager: one call on an idle device, between two events, with "
    "all that the host does.",
    "Cold L2: the calls rotate over so many sets of K and V that twice the L2 is read before one "
    "comes again; a set of 32 times the L2 is alone.",
    "GB/s counts K and V that the key ranges cover, q and o, once. % read is the share of a kernel "
    "that only reads as many bytes, in the same interleaving, the fastest of its configurations; % "
    "ceil the share of that kernel's rate on a buffer of 2 GiB. best /ours: the fastest peer, not "
    "counting our own kernel under other schedules.",
    "error is the largest of o, relative to the row's largest magnitude, against float64, of what "
    "the last replay wrote over NaN; more than twice that of plain PyTorch plus one rounding is "
    "WRONG. Peers that are wrong count as not available.",
    "torch flash and cuDNN get keys that the host slices to the length, if there is one for all; "
    "varlen gets the lengths in a tensor, as lean_decode does; per_seq is a call of torch flash "
    "for each sequence, lengths on the host. FlashInfer's plan, which the host makes of the "
    "lengths, and the schedules of FA3 and FlashMLA are made before and not timed; FA3 attends to "
    "latents by q_v. "
    "unsplit (a block for each output, as in FlashAttention-2), equal (splits, as in "
    "FlashDecoding) and spin (as in LeanAttention) are lean_decode's own inner loop under other "
    "schedules.",
)
HEADINGS = {
    peers.FLASH: "flash us",
    peers.VARLEN: "varlen us",
    peers.EACH: "per_seq us",
    peers.CUDNN: "cuDNN us",
    peers.FLEX: "flex us",
    libraries.FLASHINFER: "FlashInfer us",
    libraries.FLASH_3: "FA3 us",
    libraries.FLASH_MLA: "FlashMLA us",
    peers.UNSPLIT: "unsplit us",
    peers.EQUAL_SPLIT: "equal us",
    peers.SPIN: "spin us",
    **{name: name for name in peers.WORKERS},
    PYTORCH: "torch us",
}


def columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    def times_of(name: str, suffix: str = "times") -> list[str]:
        return [
            microseconds(row[suffix][name]["median_us"]) if name in row[suffix] else "-"
            for row in rows
        ]

    table = [
        Column("case", [row["name"] for row in rows]),
        Column("ours us", times_of(OURS)),
        Column("p10-p90", [_spread(row) for row in rows]),
        Column("eager us", times_of(OURS, "eager")),
        Column("GB/s", [_number(row.get("bandwidth"), 1e-9) for row in rows]),
        Column("% read", [_number(row.get("read_share"), 100) for row in rows]),
        Column("% ceil", [_number(row.get("ceiling_share"), 100) for row in rows]),
        Column("best /ours", [_best(row) for row in rows]),
    ]
    for name, heading in HEADINGS.items():
        if any(name in row["times"] for row in rows):
            table.append(Column(heading, times_of(name)))
    errors = [row["accuracy"].get(OURS, {}).get("o_error") for row in rows]
    table.append(Column("error", ["-" if e is None else f"{e:.0e}" for e in errors]))
    table.append(Column("right", [_verdict(row) for row in rows]))
    return table


def line(row: Mapping[str, Any]) -> str:
    """Return the line to print as soon as a row is there, in case the run is ended early."""
    verdict = "WRONG " if row["wrong"] else ""
    if OURS not in row["times"]:
        return f"{row['name']}: {verdict}{row['unavailable'].get(OURS, '')}"
    times = ", ".join(
        f"{name} {microseconds(times['median_us'])}" for name, times in row["times"].items()
    )
    share = _number(row.get("read_share"), 100)
    return f"{row['name']}: {verdict}{share} % of the read probe; us: {times}"


def missing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who was not timed, why, and in how many rows."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row["unavailable"].items():
            where.setdefault((name, why), []).append(row["name"])
    return [
        f"n/a: {name} ({why}): {len(names)} of {len(rows)} rows, the first is {names[0]}"
        for (name, why), names in sorted(where.items())
    ]


def microseconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _verdict(row: Mapping[str, Any]) -> str:
    return "WRONG" if row["wrong"] else "yes"


def _number(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:.0f}"


def _spread(row: Mapping[str, Any]) -> str:
    times = row["times"].get(OURS)
    return f"{microseconds(times['p10_us'])}-{microseconds(times['p90_us'])}" if times else "-"


def _best(row: Mapping[str, Any]) -> str:
    best = best_peer(row)
    if best is None or OURS not in row["times"]:
        return "-"
    return f"{best[1] / row['times'][OURS]['median_us']:.2f}"
