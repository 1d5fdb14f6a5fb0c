# SPDX-License-Identifier: BSD-3-Clause
"""README.md: its commands, its links and its numbers."""

import re
import shlex
from pathlib import Path

import pytest

from test_figures import NUMBER, rounds_to
from test_values import cache_gb, state_kb
from tree_attention.__main__ import main
from tree_attention.planning.arithmetic import FORMS, TENSOR, Plan, Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
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


def plan_of(model: str, context: int, ranks: int) -> Plan:
    return Plan(NAMED[model], Hosts(MACHINES["cpu"], LINKS["10gbe"]), ranks, Work(context))


def seconds(plan: Plan, form: str) -> float:
    return plan.split(form).token_seconds(plan.hosts).total


def times(plan: Plan, form: str) -> list[float]:
    """Milliseconds of a token and minutes of the prompt, or none if the form is refused."""
    if plan.refusal(form):
        return []
    minutes = plan.split(form).prefill_seconds(plan.hosts).total / 60
    return [1e3 * seconds(plan, form), minutes]


def check_numbers(cells: list[str], expected: list[float]) -> None:
    """The numbers in the cells, whatever words are there."""
    found = NUMBER.findall(" ".join(cells).replace("**", ""))
    assert len(found) == len(expected), f"{cells} should show {expected}"
    assert all(map(rounds_to, expected, found)), f"{cells} should show {expected}"


def after_the_plan() -> tuple[str, list[list[str]], list[list[str]]]:
    """The command `plan`, and the cells of the two tables after it."""
    text = README.replace("\\\n", " ")
    (command,) = re.findall(r"^python -m tree_attention (plan .*)$", text, re.MULTILINE)
    after = text.partition(command)[2].partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", after, re.MULTILINE)
    first, second = (
        [[cell.strip() for cell in row.strip("|").split("|")] for row in x.splitlines()[2:]]
        for x in tables
    )
    return command, first, second


def test_rows_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs, and the table after it says what its best form takes."""
    command, rows, _ = after_the_plan()
    assert main(shlex.split(command)) == 0
    assert "196,608 tokens, 4 ranks" in capsys.readouterr().out
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    for hosts, held, *shown in rows:
        plan = plan_of("glm-4.7-flash", 192 << 10, int(hosts))
        check_numbers([held], [plan.split(plan.best()).held_bytes / 1e9])
        check_numbers(shown[0::2], times(plan, plan.best()))
        check_numbers(shown[1::2], times(plan, TENSOR))


def test_models_with_few_and_many_heads() -> None:
    """Splitting by heads next to the fastest way to split tokens. The faster one is bold."""
    rows = after_the_plan()[-1]
    assert len(rows) == 4
    for name, heads, hosts, *shown in rows:
        title, thousands = re.fullmatch(r"(.*), ([\d,]+)k tokens", name).groups()
        (model,) = (key for key, model in NAMED.items() if model.name == title)
        plan = plan_of(model, int(thousands.replace(",", "")) << 10, int(hosts))
        assert heads.split()[0] == str(plan.model.kv_heads)
        tokens = [x for x in FORMS if plan.split(x).tensor_parallel_size < int(hosts)]
        forms = TENSOR, min(tokens, key=lambda form: seconds(plan, form))
        check_numbers(shown[:2], [plan.split(form).cache_bytes / 1e9 for form in forms])
        check_numbers(shown[2:], [times(plan, form)[0] for form in forms])
        first, second = (seconds(plan, form) for form in forms)
        assert [x.startswith("**") for x in shown[2:]] == [first < second, second < first]


def test_numbers_of_the_architecture():
    """GB of a rank and kB of a message: a state of each head, o and lse in float32."""
    model, tokens, ranks = NAMED["llama-3.1-8b"], 1 << 20, 4
    drawn = " ".join(re.findall(r">([^<>]+)</text>", (ROOT / "docs/architecture.svg").read_text()))
    assert f"{model.name}, {tokens:,} tokens: {cache_gb(1):.0f} GB" in drawn
    assert drawn.count(f"{cache_gb(ranks):.0f} GB stay here") == ranks
    assert f"{state_kb():.1f} kB from every rank to every other" in drawn
    (alternative,) = re.findall(r"^!\[(.*)\]\(docs/architecture\.svg\)", README, re.MULTILINE)
    assert NUMBER.findall(alternative) == [f"{cache_gb(ranks):.0f}", f"{state_kb():.1f}"]
