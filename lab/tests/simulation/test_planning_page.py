# SPDX-License-Identifier: BSD-3-Clause
"""docs/planning.md: its command prints what it says, and its lists and errors are right."""

import re
import shlex
from pathlib import Path

import pytest

from lab.simulation import planning
from tree_attention.__main__ import main
from tree_attention.planning.machines import SUSTAINED

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/planning.md").read_text()
README = (ROOT / "README.md").read_text()
WHOLE_LINES = (PAGE + README).replace("\\\n", "")
LINES = re.findall(r"^python -m tree_attention (plan [^#\n]*)", WHOLE_LINES, re.MULTILINE)


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table costs.json that commands of the pages name."""
    monkeypatch.chdir(tmp_path)
    planning.save_example_costs(Path("costs.json"))


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize("line", LINES)
def test_command_lines_are_understood(line: str) -> None:
    assert main(shlex.split(line)) == 0


def test_both_pages_have_a_command() -> None:
    assert len(LINES) == 4


def test_predictions_and_outputs_of_examples() -> None:
    assert len(planning.EXAMPLE.findall(PAGE)) == 3
    assert planning.written(PAGE) == PAGE, "run: python -m lab.simulation.planning"
    tokens, prompts = ([int(row[i].removesuffix(" %")) for row in planning.rows()] for i in (7, 10))
    assert len(tokens) == 8
    # The range that the page states for whole weights, for split ones, and for prompts.
    whole, split = ([tokens[i] for i in rows] for rows in ((0, 1, 4, 5), (2, 3, 6, 7)))
    assert (max(whole), min(whole), max(split), min(split)) == (0, -3, -10, -13)
    assert (max(prompts), min(prompts)) == (0, -9)


def test_numbers_about_the_measured_runs() -> None:
    machine = planning._scaling()[-1]
    latents, dense = planning.latent_rows(), planning.rows()
    missing = [float(row[4]) - float(row[5]) for row in latents]
    over = [float(row[4]) / float(row[5]) for row in latents]
    of_two = [float(row[5]) / float(row[6]) for row in dense]
    values = {
        "read": f"{machine.memory_bandwidth / 1e9:.1f}",
        "computed": f"{SUSTAINED * machine.arithmetic / 1e12:.2f}",
        "missing_4k": f"{missing[0]:.1f}",
        "missing_8k": f"{missing[1]:.1f}",
        "longest": f"{max(over + of_two):.1f}",
        "longest_two": f"{max(of_two):.2f}",
    }
    marked = re.compile(r"([\d.]+)<!-- value: lab\.(\w+) -->")
    assert {name: number for number, name in marked.findall(PAGE)} == values
    for page in (README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))):
        assert all(number == values[name] for number, name in marked.findall(page))
