# SPDX-License-Identifier: BSD-3-Clause
"""docs/design.md: its example is right, in exact arithmetic. docs/exchange.md has each strategy
once, and their formulas are what runs counted."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from benchmarks.harness.results import value
from tree_attention.exchange.strategies import STRATEGIES, StateLayout, Topology

PAGE = Path(__file__).parents[2] / "docs/design.md"
MINUS = "\N{MINUS SIGN}"


def state(name: str, weights: list[int], values: list[int]) -> tuple[int, Fraction, str]:
    """The sum of the exponentials, `o`, and the line of the page that says so, without spaces."""
    total = sum(weights)
    o = Fraction(sum(w * v for w, v in zip(weights, values, strict=True)), total)
    products = "+".join(f"{w}·{v}" for w, v in zip(weights, values, strict=True))
    lse = f"log({'+'.join(map(str, weights))})=log{total}={math.log(total):.3f}"
    return total, o, f"{name}:lse={lse}o=({products})/{total}={o}\n"


def test_worked_example() -> None:
    section = re.search(r"## A worked example\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert section is not None
    text = section[1].replace(" ", "")
    table = re.findall(r"^\|([ab])\|(\d)\|(\d+)\|(\d+)\|$", text, re.MULTILINE)
    assert [f"{rank}{key}" for rank, key, *_ in table] == ["a0", "a1", "b2", "b3"]
    weights, values = ([int(row[column]) for row in table] for column in (2, 3))

    sum_a, o_a, line_a = state("ranka", weights[:2], values[:2])
    sum_b, o_b, line_b = state("rankb", weights[2:], values[2:])
    total, o, line = state("whole", weights, values)
    assert line_a in text and line_b in text and line in text

    t = Fraction(sum_a, sum_b)
    r = 1 / (1 + t)
    assert t < 1  # b has the larger lse, and the weight r
    assert t * r * o_a + r * o_b == o
    lse_a, lse_b = math.log(sum_a), math.log(sum_b)
    assert f"t=exp({MINUS}|{lse_a:.3f}{MINUS}{lse_b:.3f}|)={sum_a}/{sum_b}={t}" in text
    assert f"r=1/(1+t)={r}\n" in text
    assert f"lse={lse_b:.3f}+log(1+t)=log{total}={math.log(total):.3f}" in text
    assert f"o={t * r}·{o_a}+{r}·{o_b}={o}\n" in text


def test_the_statements_of_a_step_are_those_of_the_code() -> None:
    section = re.search(r"this is three statements:\n\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    assert section is not None
    lines = [line.strip() for line in section[1].splitlines()]
    code = (PAGE.parents[1] / "python/tree_attention/decode.py").read_text()
    assert len(lines) == 3 and all(f" {line}\n" in code for line in lines)


EXCHANGE = PAGE.with_name("exchange.md").read_text()


def test_every_strategy_has_one_row() -> None:
    strategies = EXCHANGE.split("## Strategies\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", strategies, re.MULTILINE)
    assert sorted(rows) == sorted(STRATEGIES)


def test_bytes_of_strategies_are_those_of_their_formulas() -> None:
    """The results of eight hosts have counted them."""
    for name in ("all_gather", "two_phase", "butterfly", "three_allreduce"):
        row = {"case": "metro p=8 B=64 n=4", "method": name}
        layout = StateLayout((64, 32, 1), 128, torch.float32)
        traffic = STRATEGIES[name].traffic(layout, Topology.of("abcdefgh"), torch.bfloat16, False)
        counted = value("cluster_metro", row, "bytes sent")
        assert counted == pytest.approx(traffic.bytes_sent, rel=2e-4)
