# SPDX-License-Identifier: BSD-3-Clause
"""docs/two_servers.md: its program runs on two ranks with a tiny model in the place of the large
one, its table is what `plan` says, and docs/README.md has every page."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from test_readme import ROOT, TWO_RANKS, python_program, run
from tree_attention.planning.arithmetic import Plan, Work
from tree_attention.planning.machines import LINKS, MACHINES, Hosts
from tree_attention.planning.models import NAMED

PAGE = ROOT / "docs/two_servers.md"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.deep
def test_program_runs_with_a_tiny_model(tmp_path: Path) -> None:
    checkpoint, document = tmp_path / "model", tmp_path / "document.txt"
    shutil.copytree(ROOT / "examples/passkey-llama", checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    document.write_text("The pass key of the garden is 48213. Remember it. The sky is blue.")
    program = python_program(PAGE)
    for old, new in (("Llama-3.1-8B-Instruct", checkpoint), ("document.txt", document)):
        assert program.count(f'"{old}"') + program.count(f"'{old}'") == 1
        program = program.replace(old, str(new))
    # The tiny model has as many key heads as there are ranks.
    (script := tmp_path / "document.py").write_text(program)
    printed = run(script, *TWO_RANKS, OMP_NUM_THREADS="1").splitlines()
    assert re.fullmatch(r"reading \d+ tokens", printed[0])
    assert re.fullmatch(r"\d+ s", printed[-1]) and len(printed) > 2


def of_hosts(number: int, context: int) -> Plan:
    model = NAMED["llama-3.1-8b"]
    return Plan(model, Hosts(MACHINES["cpu"], LINKS["10gbe"]), number, Work(context))


def test_table_is_that_of_the_plan() -> None:
    rows = re.findall(
        r"^\| (\d) \| ([\d,]+) tokens \| (\S+) GB \| (\S+) GB \| (\S+) s \| (\S+) ms \|$",
        PAGE.read_text(),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["1", "2", "1", "2"]
    for number, tokens, weights, cache, prompt, token in rows:
        plan = of_hosts(int(number), int(tokens.replace(",", "")))
        split = plan.split(plan.best())
        found = (split.weights_bytes / 1e9, split.cache_bytes / 1e9)
        found += (
            split.prefill_seconds(plan.hosts).total,
            1e3 * split.token_seconds(plan.hosts).total,
        )
        assert [weights, cache, prompt, token] == [f"{x:.3g}" for x in found]


def test_half_the_memory_is_that_of_the_plan() -> None:
    section = PAGE.read_text().split("## 7.")[1]
    rows = re.findall(r"^\| (\d) \|.*\| (\S+) GB \| (\S+) ms \|$", section, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    model = NAMED["llama-3.1-8b"]
    small = replace(model, kv_dtype="int8", weights=model.weights.quantised("int8"))
    for (number, *shown), shape in zip(rows, 2 * (model, small), strict=True):
        plan = replace(of_hosts(int(number), 1 << 17), model=shape)
        split = plan.split(plan.best())
        held, token = split.held_bytes / 1e9, 1e3 * split.token_seconds(plan.hosts).total
        assert shown == [f"{held:.1f}", f"{token:.1f}"]


def test_index_has_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    linked = set(re.findall(r"\]\((\w+\.md)", index))
    assert linked | {"README.md"} == {page.name for page in (ROOT / "docs").glob("*.md")}
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
