# SPDX-License-Identifier: BSD-3-Clause
"""docs/command_line.md has every option of every command; docs/environment.md every variable."""

import re
import runpy
from pathlib import Path

from tree_attention.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PROGRAM = runpy.run_path(str(ROOT / "scripts/command_line.py"))


def test_page_has_the_options_of_the_parsers() -> None:
    page = PROGRAM["PAGE"].read_text()
    assert page == PROGRAM["written"](page), "run: PYTHONPATH=python python scripts/command_line.py"
    for command in COMMANDS:
        assert f"\n## {command}\n" in page
        for action in PROGRAM["parser_of"](command)._actions:
            assert all(
                f"`{name}`" in page
                for name in action.option_strings
                if name not in ("-h", "--help")
            )


def test_variables_of_the_sources_are_on_the_page() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    named = set(re.findall(r"^\| `([A-Z_]+)`", page, re.MULTILINE))
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    text = "\n".join(source.read_text() for source in sources)
    ours = {"TREE_ATTENTION_VLLM", "TREE_ATTENTION_COSTS", "TREE_ATTENTION_NODE"}
    ours |= {*re.findall(r"(?:getenv|environ\.get|check_env)\(\"(TREE_ATTENTION_[A-Z_]+)\"", text)}
    assert "TREE_ATTENTION_CHECK_PAGES" in ours and ours <= named
    assert {x for x in named if x.startswith("TREE_ATTENTION_")} <= {
        *re.findall(r"\bTREE_ATTENTION_[A-Z_]+", text)
    }
