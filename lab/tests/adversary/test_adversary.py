# SPDX-License-Identifier: BSD-3-Clause
"""Two minutes of the fuzzer with fixed seeds. `python -m lab.adversary --help` goes on for hours.

A failure says how to play its case alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.adversary import engines, queries, runner
from lab.adversary.cases import Case, made_once
from lab.adversary.threads import run_threads


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize(
    "part, count",
    [
        ("ops", 500),
        ("layouts", 400),
        ("ranks", 250),
        ("threads", 40),
        ("sessions", 20),
        ("differing", 12),
        ("snapshots", 40),
        ("callers", 24),
        ("late", 12),
        ("environments", 16),
    ],
)
def test_no_rule_is_broken(part: str, count: int, seed: int) -> None:
    if part in ("sessions", "differing", "snapshots", "callers", "late"):
        pytest.importorskip("transformers")
    cases = [Case(part, seed, index) for index in range(count)]
    if part == "sessions":  # interpreters take seconds to start
        cases = [case for case in cases if runner.world_of(case).size == 2]
    finding = next(runner.find(part, seed, [case.index for case in cases]), None)
    assert finding is None, finding


@pytest.mark.parametrize("kind", [*queries.KINDS, *engines.KINDS, "scalars"])
def test_a_kind_of_ranks(kind: str) -> None:
    """Of each a few, which the draw of all kinds may leave out."""
    finding = next(runner.find("ranks", 2, range(8), kind), None)
    assert finding is None, finding


def test_a_fault_is_found_and_its_case_is_named() -> None:
    """A part that breaks a rule in one of its cases, on one rank."""
    (finding,) = runner.find("toy", 5, range(4))
    assert finding.cases == [Case("toy", 5, 2)]
    assert "python -m lab.adversary --only toy --seed 5 --case 2\n" in str(finding)
    assert "the ranks differ" in finding.text
    assert "case 2, played again alone, shows the same fault\n" in str(finding)


@pytest.mark.parametrize(
    "later, says",
    [
        ("a fault after 2.75 s", "shows the same fault"),
        ("fine", "does not show it"),
        ("a hang", "shows another fault:"),
    ],
)
def test_a_finding_says_what_its_case_does_alone(later: str, says: str, tmp_path: Path) -> None:
    (finding,) = runner.find("toy", 5, [2], f"{tmp_path / 'times'},{later}")
    assert f"\ncase 2, played again alone, {says}" in str(finding)
    assert finding.cases[-1].index == 2


def test_references_are_made_before_threads_begin() -> None:
    made: list[tuple[str, int]] = []

    @made_once
    def make(name: str, size: int = 1) -> str:
        made.append((name, size))
        return name

    assert make("a") == make(name="a", size=1) == "a"
    run_threads({"reader": lambda: make("a", 1)}, 1.0)  # type: ignore[dict-item,return-value]
    with pytest.raises(AssertionError, match="before threads begin"):
        run_threads({"maker": lambda: make("b")}, 1.0)  # type: ignore[dict-item,return-value]
    assert made == [("a", 1)]
