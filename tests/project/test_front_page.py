# SPDX-License-Identifier: BSD-3-Clause
"""README.md: its commands, its links and its numbers."""

import re
import shlex
from pathlib import Path

import pytest

from tree_attention.__main__ import main
from tree_attention.planning.arithmetic import TENSOR, Plan, Work
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
    """The command runs, and the table says what its best form takes."""
    text = README.replace("\\\n", " ")
    (command,) = re.findall(r"^python -m tree_attention (plan .*)$", text, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert "4 ranks" in capsys.readouterr().out
    section = README.split("### How fast will it be?")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert len(rows[2:]) == 4
    for hosts, size, token, prompt in rows[2:]:
        plan = plan_of(int(hosts), 128 << 10)
        split = plan.split(plan.best())
        assert size.strip() == f"{(split.weights_bytes + split.cache_bytes) / 1e9:.1f} GB"
        assert token.strip() == f"{1e3 * split.token_seconds(plan.hosts).total:.0f} ms"
        assert prompt.strip() == f"{split.prefill_seconds(plan.hosts).total / 60:.1f} minutes"
    plan = plan_of(16, 1 << 20)
    ours, tensor = (plan.split(form) for form in (plan.best(), TENSOR))
    found = [
        (f"{1e3 * x.token_seconds(plan.hosts).total:.0f} ms", f"{x.cache_bytes / 1e9:.1f} GB")
        for x in (ours, tensor)
    ]
    words = " ".join(section.split())
    assert f"takes {found[0][0]} and each host holds {found[0][1]} of cache" in words
    assert f"tensor parallelism alone takes {found[1][0]} and {found[1][1]}" in words


def test_numbers_of_the_architecture():
    """GB of a rank and kB of a message: a state of each head, o and lse in float32."""
    model, tokens, ranks = NAMED["llama-3.1-8b"], 1 << 20, 4
    drawn = " ".join(re.findall(r">([^<>]+)</text>", (ROOT / "docs/architecture.svg").read_text()))
    (layers,) = model.attention
    whole = layers.layers * layers.token_bytes("bf16") * tokens
    state = 4 * layers.heads * (128 + 1)
    assert f"{model.name}, {tokens:,} tokens: {whole / 1e9:.0f} GB" in drawn
    assert drawn.count(f"{whole / ranks / 1e9:.0f} GB stay here") == ranks
    assert f"{state / 1e3:.1f} kB from every rank to every other" in drawn
    assert f"{whole / ranks / 1e9:.0f} GB" in README and f"{state / 1e3:.1f} kB" in README
