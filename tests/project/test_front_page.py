# SPDX-License-Identifier: BSD-3-Clause
"""README.md: its order, its pictures, its commands and its numbers."""

import re
import shlex
from pathlib import Path

from tree_attention.__main__ import main
from tree_attention.planning.models import NAMED

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINES = README.splitlines()
PAGES = sorted((ROOT / "docs").glob("*.md"))
ORDER = (
    "Install, and see it run",
    "A HuggingFace model",
    "Your own engine",
    "A cluster",
    "Measured",
    "The papers",
    "Read on",
)


def test_installing_is_at_the_top():
    assert next(i for i, line in enumerate(LINES, 1) if "pip install" in line) <= 25


def test_the_two_commands_of_a_fresh_clone_stand_side_by_side():
    (block,) = (x for x in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "demo.sh" in x)
    commands = re.findall(r"^(\S+) +# sets up", block, re.MULTILINE)
    assert commands == ["scripts/demo.sh", "scripts/test.sh"]
    for command in commands:
        text = (ROOT / command).read_text()
        assert re.search(r"^source .*/setup\"$", text, re.MULTILINE), f"{command} does not set up"


def test_three_pictures():
    assert re.findall(r"!\[[^\]]+\]\(([^)]*)\)", README) == [
        f"docs/{name}" for name in ("architecture.svg", "tokens.png", "contexts.png")
    ]


def test_order_of_the_sections():
    assert tuple(re.findall(r"^## (.*)$", README, re.MULTILINE)) == ORDER


def test_every_page_is_in_the_index():
    index = README[README.index("## Read on") :]
    linked = set(re.findall(r"\]\(docs/([\w.]+)", index))
    assert linked | {"measured.md"} == {page.name for page in PAGES}
    assert "](docs/measured.md)" in README  # where its figures begin


def test_line_of_the_plan(capsys):
    """The plan prints the line that README shows."""
    (found,) = re.findall(
        r"^(python -m tree_attention plan [^#]*?) +#.*\n#   (.*)$", README, re.MULTILINE
    )
    command, shown = found
    assert main(shlex.split(command)[3:]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown.split() in printed


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
