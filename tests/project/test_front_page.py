# SPDX-License-Identifier: BSD-3-Clause
"""README.md: its commands, its links and its numbers."""

import re
import shlex
from pathlib import Path

import pytest

from test_figures import NUMBER
from test_values import cache_gb, state_kb
from tree_attention.__main__ import main
from tree_attention.planning.arithmetic import Plan, Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import NAMED

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_two_commands_of_a_fresh_clone_stand_side_by_side():
    (block,) = (x for x in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "demo.sh" in x)
    commands = re.findall(r"^# Sets up, [^:]*:(?:.*\n# )*.*\n(\S+)$", block, re.MULTILINE)
    assert commands == ["scripts/demo.sh", "scripts/test.sh"]
    for command in commands:
        text = (ROOT / command).read_text()
        assert re.search(r"^source .*/setup\"$", text, re.MULTILINE), f"{command} does not set up"


def plan_of(ranks: int, context: int) -> Plan:
    hosts = Hosts(MACHINES["cpu"], LINKS["10gbe"])
    return Plan(NAMED["llama-3.1-8b"], hosts, ranks, Work(context))


def test_rows_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs, and the table after it says what its best form takes."""
    text = README.replace("\\\n", " ")
    (command,) = re.findall(r"^python -m tree_attention (plan .*)$", text, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert "4 ranks" in capsys.readouterr().out
    table = re.findall(r"(?:^\|.*\n)+", text.partition(command)[2], re.MULTILINE)[0]
    rows = [NUMBER.findall(line) for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    for hosts, *shown in rows:
        plan = plan_of(int(hosts), 128 << 10)
        split = plan.split(plan.best())
        assert shown == [
            f"{(split.weights_bytes + split.cache_bytes) / 1e9:.1f}",
            f"{1e3 * split.token_seconds(plan.hosts).total:.0f}",
            f"{split.prefill_seconds(plan.hosts).total / 60:.1f}",
        ]


def test_numbers_of_the_architecture():
    """GB of a rank and kB of a message: a state of each head, o and lse in float32."""
    model, tokens, ranks = NAMED["llama-3.1-8b"], 1 << 20, 4
    drawn = " ".join(re.findall(r">([^<>]+)</text>", (ROOT / "docs/architecture.svg").read_text()))
    assert f"{model.name}, {tokens:,} tokens: {cache_gb(1):.0f} GB" in drawn
    assert drawn.count(f"{cache_gb(ranks):.0f} GB stay here") == ranks
    assert f"{state_kb():.1f} kB from every rank to every other" in drawn
    (alternative,) = re.findall(r"^!\[(.*)\]\(docs/architecture\.svg\)", README, re.MULTILINE)
    assert NUMBER.findall(alternative) == [f"{cache_gb(ranks):.0f}", f"{state_kb():.1f}"]
