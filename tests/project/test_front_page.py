# SPDX-License-Identifier: BSD-3-Clause
"""README.md: its commands, its links and its numbers."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.tables import hosts_of_glm
from test_values import NUMBER, cache_gb, state_kb
from tree_attention.__main__ import main
from tree_attention.planning.models import NAMED

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_two_commands_of_a_fresh_clone_stand_side_by_side():
    (block,) = (x for x in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "demo.sh" in x)
    commands = re.findall(r"^[^#\n].*", block, re.MULTILINE)
    assert commands == ["scripts/demo.sh", "scripts/test.sh"]
    for command in commands:
        text = (ROOT / command).read_text()
        assert re.search(r"^source .*/setup\"$", text, re.MULTILINE), f"{command} does not set up"


def test_the_plan_before_the_table_is_its_row_of_four_hosts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = README.replace("\\\n", " ")
    (command,) = re.findall(r"^python -m tree_attention (plan .*)$", text, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert "196,608 tokens, 4 ranks" in printed
    (best,) = re.findall(r" \* +(\d.*)$", printed, re.MULTILINE)
    *_, token, _, prompt, _ = re.split(" +", best.strip())
    (row,) = (x for x in hosts_of_glm() if x[0] == "4")
    assert row[2] == f"{float(token):.0f} ms" and row[4] == f"{float(prompt) / 60:.1f} minutes"


def test_numbers_of_the_architecture():
    """GB of a rank and kB of a message: a state of each head, o and lse in float32."""
    model, tokens, ranks = NAMED["llama-3.1-8b"], 1 << 20, 4
    drawn = " ".join(re.findall(r">([^<>]+)</text>", (ROOT / "docs/architecture.svg").read_text()))
    assert f"{model.name}, {tokens:,} tokens: {cache_gb(1):.0f} GB" in drawn
    assert drawn.count(f"{cache_gb(ranks):.0f} GB stay here") == ranks
    assert f"{state_kb():.1f} kB from every rank to every other" in drawn
    (alternative,) = re.findall(r"^!\[(.*)\]\(docs/architecture\.svg\)", README, re.MULTILINE)
    assert NUMBER.findall(alternative) == [f"{cache_gb(ranks):.0f}", f"{state_kb():.1f}"]
