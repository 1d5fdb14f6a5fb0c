# SPDX-License-Identifier: BSD-3-Clause
"""Targets of the CUDA kernel, met or missed by the rows of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cases import CAPACITY, LATENCY, OURS, QUERIES, RAGGED, UNIFORM
from .merge import SECTION as MERGE
from .peers import ABLATIONS, FLASH, VARLEN
from .rows import best_peer, ratio

Row = Mapping[str, Any]
READ_SHARES = {512: 0.92, 128: 0.85}  # by 10^6 bytes of keys and values
LATENCY_US = 6.5
RAGGED_EXCESS = 1.05
PEER_EXCESS = 1.03
FLASH_RATIO = 1.5
ABLATION_RATIO = 2.0


@dataclass(frozen=True)
class Target:
    name: str
    met: bool | None  # None: no row of this run tells
    detail: str

    @property
    def text(self) -> str:
        verdict = "not measured" if self.met is None else "met" if self.met else "MISSED"
        return f"{verdict}: {self.name}{self.detail and '; '}{self.detail}"


def evaluate(rows: Sequence[Row]) -> list[Target]:
    """Every target, met if all of its rows meet it. Of rows that are not WRONG."""
    right = [row for row in rows if not row["wrong"] and OURS in row["times"]]
    decode = [row for row in right if row["section"] != MERGE]
    found = [read_share(decode, *bound) for bound in READ_SHARES.items()]
    found += [latency(decode), ragged(decode), peers(right)]
    found += [flash(decode, section) for section in (RAGGED, CAPACITY, QUERIES)]
    return found + [ablation(decode, name) for name in ABLATIONS.values()]


def read_share(rows: Sequence[Row], megabytes: int, bound: float) -> Target:
    shares = {
        row["name"]: row["read_share"]
        for row in rows
        if row["read_bytes"] >= megabytes * 10**6 and "read_share" in row
    }
    name = f">= {bound:.0%} of the read probe from {megabytes} MB of K and V on"
    return _at_least(name, shares, bound, lambda share: f"{share:.1%}")


def latency(rows: Sequence[Row]) -> Target:
    name = f"<= {LATENCY_US} us for {LATENCY.name}"
    for row in rows:
        if row["name"] == LATENCY.name:
            time = row["times"][OURS]["median_us"]
            return Target(name, time <= LATENCY_US, f"{time:.2f} us")
    return Target(name, None, "")


def ragged(rows: Sequence[Row]) -> Target:
    """Each ragged row follows the list of cases with a uniform twin of as many keys."""
    name = f"ragged within {RAGGED_EXCESS - 1:.0%} of as many bytes in one length"
    ratios = {}
    for row in rows:
        if row["section"] != RAGGED:
            continue
        for twin in rows:
            same = twin["section"] == UNIFORM and _same_keys(row["case"], twin["case"])
            if same:
                per_byte = [x["times"][OURS]["median_us"] / x["io_bytes"] for x in (row, twin)]
                ratios[row["name"]] = per_byte[0] / per_byte[1]
    return _at_most(name, ratios, RAGGED_EXCESS)


def peers(rows: Sequence[Row]) -> Target:
    name = f"nowhere more than {PEER_EXCESS - 1:.0%} slower than the best peer"
    ratios = {}
    for row in rows:
        best = best_peer(row)
        if best is not None:
            ratios[f"{row['name']}, {best[0]}"] = row["times"][OURS]["median_us"] / best[1]
    return _at_most(name, ratios, PEER_EXCESS)


def flash(rows: Sequence[Row], section: str) -> Target:
    """Against torch flash with lengths on the device, where these are what the row is about."""
    ratios = {}
    for row in rows:
        if row["section"] != section:
            continue
        for name in (VARLEN, FLASH):
            quotient = ratio(row, name)
            if quotient is not None:
                ratios[f"{row['name']}, {name}"] = quotient
                break
    name = f">= {FLASH_RATIO} times as fast as torch flash: {section}"
    return _at_least(name, ratios, FLASH_RATIO, lambda x: f"{x:.2f}")


def ablation(rows: Sequence[Row], variant: str) -> Target:
    """The row where the variant loses most."""
    ratios = {row["name"]: q for row in rows if (q := ratio(row, variant)) is not None}
    name = f">= {ABLATION_RATIO:g} times as fast as {variant} in its worst row"
    if not ratios:
        return Target(name, None, "")
    worst = max(ratios, key=lambda row: ratios[row])
    return Target(name, ratios[worst] >= ABLATION_RATIO, f"{ratios[worst]:.2f} ({worst})")


def _same_keys(case: Mapping[str, Any], twin: Mapping[str, Any]) -> bool:
    keys = ("dtype", "heads", "head_dim", "seqlen_q")
    if any(case[key] != twin[key] for key in keys) or len(case["lengths"]) != len(twin["lengths"]):
        return False
    return 0 <= sum(twin["lengths"]) - sum(case["lengths"]) < len(case["lengths"])


def _at_least(name: str, values: Mapping[str, float], bound: float, show: Any) -> Target:
    if not values:
        return Target(name, None, "")
    worst = min(values, key=lambda row: values[row])
    reached = sum(value >= bound for value in values.values())
    detail = f"{reached} of {len(values)} rows, least {show(values[worst])} ({worst})"
    return Target(name, reached == len(values), detail)


def _at_most(name: str, values: Mapping[str, float], bound: float) -> Target:
    if not values:
        return Target(name, None, "")
    worst = max(values, key=lambda row: values[row])
    reached = sum(value <= bound for value in values.values())
    detail = f"{reached} of {len(values)} rows, most {values[worst]:.2f} ({worst})"
    return Target(name, reached == len(values), detail)
